"""The exceptions that pagedkv raises on purpose; everything else is a bug.

`PagedKVError` is the root of those defined in Python. `InvalidRequest` and `QueueFull` come from the Rust
core and are re-exported here, so that callers need only this module; they are looked up on first use, because
loading a model or doing memory arithmetic needs no compiled core.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedkv._core import InvalidRequest, QueueFull

__all__ = [
    "BackendUnavailable",
    "EngineDead",
    "InvalidRequest",
    "ModelError",
    "PagedKVError",
    "QueueFull",
    "RequestFailed",
]


class PagedKVError(Exception):
    """Root of the errors that pagedkv raises on purpose."""


class ModelError(PagedKVError, ValueError):
    """A model cannot be found, read or run: the message names the file or field, and what is allowed."""


class BackendUnavailable(PagedKVError, RuntimeError):
    """The operations were asked for on a device that they cannot run on here."""


class EngineDead(PagedKVError, RuntimeError):
    """The engine thread has stopped after an error; no request can be served until it is started anew."""


class RequestFailed(PagedKVError, RuntimeError):
    """The step that computed a request raised; the engine and the other requests go on."""


def __getattr__(name: str) -> Any:
    if name in ("InvalidRequest", "QueueFull"):
        from pagedkv import _core

        return getattr(_core, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
