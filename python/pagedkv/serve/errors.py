"""Errors as a client sees them: one exception, and the translation of everything else into it.

Every error leaves the server as `{"error": {"message", "type", "param", "code"}}`, whether as a body with a
status or as an event inside a stream that has already begun.
"""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from aiohttp import web

from pagedkv import checks
from pagedkv import errors as engine_errors
from pagedkv.errors import EngineDead, InvalidRequest, RequestFailed
from pagedkv.request import ContextOverflow
from pagedkv.text.errors import ChatTemplateError, TextError

# A client that is turned away should come back soon: the queue drains by whole requests, not by minutes.
RETRY_AFTER_S = 1
_MAX_VALUE_LEN = 80
_ENCODER = json.JSONEncoder()


class ApiError(Exception):
    """An error with everything that OpenAI's error object holds.

    Attributes:
        status: the HTTP status, where no stream has begun yet.
        message: a sentence for people: which field, which value, what is allowed.
        param: the path of the offending field (`messages[0].role`), or None.
        code: a word for programs, or None.
        headers: extra response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def type(self) -> str:
        """OpenAI's coarse class of the error."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        """The error object, wrapped as clients expect it."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> web.Response:
        """The error as a complete JSON response."""
        return web.json_response(self.body(), status=self.status, headers=self.headers)


def refuse(param: str | None, message: str, *, code: str = "invalid_value") -> NoReturn:
    """Raises a 400 about the field `param`, or the body as a whole: what was wrong, what is allowed."""
    raise ApiError(400, message, param=param, code=code)


def shown(value: Any) -> str:
    """A value as it is quoted in a message: JSON where possible, and never longer than a line.

    No more of the value is written than is shown: a client may have sent megabytes.
    """
    if isinstance(value, str):
        value = value[: _MAX_VALUE_LEN + 1]
    text = ""
    try:
        for piece in _ENCODER.iterencode(value):
            text += piece
            if len(text) > _MAX_VALUE_LEN:
                return f"{text[:_MAX_VALUE_LEN]}..."
    except (TypeError, ValueError):
        return checks.shown(value)
    return text


def from_exception(error: Exception) -> ApiError | None:
    """The client's view of an exception from the engine or from aiohttp; None for a fault of our own."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return from_invalid(error, {})
    if isinstance(error, TextError | ChatTemplateError):
        return ApiError(400, str(error))
    # Looked up here: without the compiled core there is no such class, and the start has to say so itself.
    if isinstance(error, engine_errors.QueueFull):
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return ApiError(429, f"{error}.", code="queue_full", headers=headers)
    if isinstance(error, engine_errors.NotFound):
        return ApiError(404, f"{_capitalised(str(error))}.", code="not_found")
    if isinstance(error, engine_errors.Conflict):
        return ApiError(409, f"{_capitalised(str(error))}.", code="conflict")
    if isinstance(error, EngineDead):
        return ApiError(503, f"The engine has stopped: {error}", code="engine_dead")
    if isinstance(error, RequestFailed):
        return ApiError(500, f"The request failed: {error}.", code="request_failed")
    if isinstance(error, web.HTTPException) and error.status >= 400:
        return _from_http(error)
    return None


def from_invalid(error: InvalidRequest, names: Mapping[str, str]) -> ApiError:
    """A refusal of the engine's, whose fields the body calls by other `names`."""
    code = "context_length_exceeded" if isinstance(error, ContextOverflow) else "invalid_value"
    param = None if error.field is None else names.get(error.field, error.field)
    return ApiError(400, f"{error}.", param=param, code=code)


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def internal_error(request_id: str) -> ApiError:
    """What a client is told about a fault of our own: the details are in the log, under the request id."""
    message = f"The server failed on this request. The log has the details under request id {request_id}."
    return ApiError(500, message, code="internal_error")


def _from_http(error: web.HTTPException) -> ApiError:
    """Aiohttp's own refusals, which would otherwise be text/plain."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, f"The request body is too large: {error.text}", code="request_too_large")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"Method {error.method} is not allowed here. Allowed: {allowed}."
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    if isinstance(error, web.HTTPNotFound):
        return ApiError(404, "There is nothing at this address.", code="not_found")
    return ApiError(error.status, error.text or error.reason)
