"""Reads the body of a POST into a request model, and says in the log and in a header what was ignored."""

import logging
from typing import TypeVar

from aiohttp import web

from pagedkv.serve.errors import refuse, shown
from pagedkv.serve.middleware import IGNORED
from pagedkv.serve.protocol import GenerationRequest, parse_request
from pagedkv.serve.served import SERVED

logger = logging.getLogger("pagedkv.serve")

Request = TypeVar("Request", bound=GenerationRequest)

# Names of ignored fields that the log has seen; bounded, because clients make the names up.
_MAX_LOGGED_NAMES = 1000
_logged_names: set[str] = set()


async def read_request(http_request: web.Request, kind: type[Request]) -> Request:
    """The checked body. Raises ApiError 400; aiohttp raises 413 for a body that is too large."""
    try:
        raw = await http_request.read()
    except web.RequestPayloadError as error:
        refuse(None, f"The request body cannot be read: {error}.", code="invalid_body")
    request, ignored = parse_request(kind, raw, strict=http_request.app[SERVED].options.strict)
    http_request[IGNORED] = tuple(ignored)
    for name in ignored:
        if name not in _logged_names and len(_logged_names) < _MAX_LOGGED_NAMES:
            _logged_names.add(name)
            logger.warning("the request field %s is unknown and ignored (said once)", shown(name))
    return request
