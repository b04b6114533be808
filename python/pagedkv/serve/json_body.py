"""From the bytes of a body to a JSON object, within bounds on time and memory that the bytes cannot exceed.

Used by `protocol.parse_request`, which knows what the object should hold.
"""

import json
import re
from typing import Any, NoReturn

from pagedkv.serve.errors import refuse, shown

# A list or an object takes some hundred bytes of memory for two bytes of JSON, and lists are made without
# giving way to other threads. The largest sensible body has tens of thousands: every part of a message is an
# object.
MAX_CONTAINERS = 100_000

# A string, to its end or to the end of the body. Possessive, so that it takes one look at every byte.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
# Only an escape can bring half of a pair in: raw bytes of one are no valid UTF-8.
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def parse_json(raw: bytes, *, yielding: bool = False) -> dict[str, Any]:
    """The JSON object in `raw`. Raises ApiError for anything else, NaN and Infinity included.

    `yielding` takes longer, but lets other threads run meanwhile.
    """
    _bound_containers(raw)

    def not_json(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a JSON value")

    # The scanner is C and holds the GIL from end to end, unless it calls back into Python.
    hooks: dict[str, Any] = {
        "parse_int": lambda digits: int(digits),
        "parse_float": lambda digits: float(digits),
        "object_hook": lambda item: item,
    }
    try:
        # Given bytes, json would guess an encoding and let half a surrogate pair pass.
        body = json.loads(raw.decode("utf-8-sig"), parse_constant=not_json, **(hooks if yielding else {}))
    except UnicodeDecodeError as error:
        message = f"The request body is not valid UTF-8 at byte {error.start}: {error.reason}."
        refuse(None, message, code="invalid_json")
    except RecursionError:
        refuse(None, "The request body is nested too deeply.", code="invalid_json")
    except ValueError as error:
        refuse(None, f"The request body is not valid JSON: {error}.", code="invalid_json")
    if _SURROGATE_ESCAPE.search(raw):
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            message = "The request body holds half of a surrogate pair, which is no character."
            refuse(None, message, code="invalid_json")
    if not isinstance(body, dict):
        refuse(None, f"The request body must be a JSON object, got {shown(body)}.", code="invalid_json")
    return body


def _bound_containers(raw: bytes) -> None:
    if _num_opened(raw) <= MAX_CONTAINERS:
        return
    # Brackets inside of strings are text.
    num_containers = _num_opened(_STRING.sub(b"", raw))
    if num_containers > MAX_CONTAINERS:
        allowed = f"at most {MAX_CONTAINERS} lists and objects"
        refuse(None, f"The request body must hold {allowed}, holds {num_containers}.")


def _num_opened(raw: bytes) -> int:
    return raw.count(b"[") + raw.count(b"{")
