"""Checks of single values, with one wording for every refusal: the field, its value, what is allowed.

The options of an engine (`config`) and the parameters of a request (`sampling_params`) are checked by these.
The caller says which exception a refusal is, as `kind`: it is given the message and the field.
"""

import math
from collections.abc import Callable

Kind = Callable[[str, str], Exception]


def refusal(kind: Kind, field: str, value: object, allowed: str) -> Exception:
    """The exception to raise about a value that is not allowed."""
    return kind(f"{field} is {value!r}, allowed: {allowed}", field)


def check_int(kind: Kind, field: str, value: object, low: int, high: int | None, allowed: str) -> None:
    """Refuses everything but an integer in low..high; None as `high` sets no bound."""
    # A bool is an int to Python, but `n=True` is a mistake.
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < low
        or (high is not None and value > high)
    ):
        raise refusal(kind, field, value, allowed)


def check_float(kind: Kind, field: str, value: object, low: float, high: float, allowed: str) -> None:
    """Refuses everything but a finite number in low..high."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise refusal(kind, field, value, allowed)
    if not low <= value <= high:
        raise refusal(kind, field, value, allowed)


def check_bool(kind: Kind, field: str, value: object, allowed: str = "true or false") -> None:
    """Refuses everything but a truth value."""
    if not isinstance(value, bool):
        raise refusal(kind, field, value, allowed)
