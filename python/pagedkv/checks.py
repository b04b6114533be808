"""Checks of single values, with one wording for every refusal: the field, its value, what is allowed.

The options of an engine (`config`) and the parameters of a request (`sampling_params`) are checked by these.
The caller says which exception a refusal is, as `kind`: it is given the message and the field.
"""

import math
from collections.abc import Callable

Kind = Callable[[str, str], Exception]

_MAX_SHOWN_CHARS = 200


def refusal(kind: Kind, field: str, value: object, allowed: str) -> Exception:
    """The exception to raise about a value that is not allowed."""
    return kind(f"{field} is {shown(value)}, allowed: {allowed}", field)


def shown(value: object) -> str:
    """A value as a message quotes it, at most a few lines of it."""
    try:
        text = repr(value)
    except ValueError:
        # Python writes no integer of more than some thousand digits.
        text = f"<{type(value).__name__} too long to be shown>"
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


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
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise refusal(kind, field, value, allowed)
    # An integer is finite, and may be too large for the float that isfinite would make of it.
    if (isinstance(value, float) and not math.isfinite(value)) or not low <= value <= high:
        raise refusal(kind, field, value, allowed)


def check_bool(kind: Kind, field: str, value: object, allowed: str = "true or false") -> None:
    """Refuses everything but a truth value."""
    if not isinstance(value, bool):
        raise refusal(kind, field, value, allowed)
