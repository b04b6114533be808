"""The exceptions that pagedkv raises on purpose; everything else is a bug.

`PagedKVError` is the root of those defined in Python. `QueueFull`, `NotFound` and `Conflict` come from the
Rust core and are re-exported here, so that callers need only this module; they are looked up on first use, so
that a core that is not built can be reported instead of ending the import.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedkv._core import Conflict, NotFound, QueueFull

__all__ = [
    "BackendUnavailable",
    "Conflict",
    "EngineDead",
    "InvalidRequest",
    "ModelError",
    "NotFound",
    "PagedKVError",
    "QueueFull",
    "RequestFailed",
]


class PagedKVError(Exception):
    """Root of the errors that pagedkv raises on purpose."""


class ModelError(PagedKVError, ValueError):
    """A model cannot be found, read or run: the message names the file or field, and what is allowed."""


class InvalidRequest(PagedKVError, ValueError):
    """A request can never be served as it is: the message names the field, its value and what is allowed.

    Attributes:
        field: the parameter that has to change ("prompt", "max_tokens", ...). None where it is not a single
            one.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class BackendUnavailable(PagedKVError, RuntimeError):
    """The operations were asked for on a device that they cannot run on here."""


class EngineDead(PagedKVError, RuntimeError):
    """The engine thread has stopped after an error; no request can be served until it is started anew."""


class RequestFailed(PagedKVError, RuntimeError):
    """The step that computed a request raised; the engine and the other requests go on."""


def __getattr__(name: str) -> Any:
    if name in ("Conflict", "NotFound", "QueueFull"):
        from pagedkv import _core

        return getattr(_core, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
