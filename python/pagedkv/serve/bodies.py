"""Reads the body of a POST into a request model, and says in the log and in a header what was ignored."""

import asyncio
import logging
from typing import TypeVar

from aiohttp import web

from pagedkv.serve.errors import refuse, shown
from pagedkv.serve.middleware import IGNORED
from pagedkv.serve.protocol import Body, parse_request
from pagedkv.serve.served import SERVED, Served

logger = logging.getLogger("pagedkv.serve")

Request = TypeVar("Request", bound=Body)

# Bodies up to this size are parsed in place, in a few milliseconds at most; larger ones in a thread.
INLINE_BYTES = 256 * 2**10
# Names of ignored fields that the log may show; bounded, because clients make the names up.
_MAX_LOGGED_NAMES = 1000


async def read_request(http_request: web.Request, kind: type[Request]) -> Request:
    """The checked body. Raises ApiError 400; aiohttp raises 413 for a body that is too large."""
    served = http_request.app[SERVED]
    try:
        raw = await http_request.read()
    except web.RequestPayloadError as error:
        refuse(None, f"The request body cannot be read: {error}.", code="invalid_body")
    strict = served.options.strict
    if len(raw) <= INLINE_BYTES:
        request, ignored = parse_request(kind, raw, strict=strict)
    else:
        request, ignored = await asyncio.to_thread(parse_request, kind, raw, strict=strict, yielding=True)
    http_request[IGNORED] = tuple(ignored)
    _log_once(served, ignored)
    return request


def _log_once(served: Served, ignored: list[str]) -> None:
    for name in ignored:
        if name not in served.logged_names and len(served.logged_names) < _MAX_LOGGED_NAMES:
            served.logged_names.add(name)
            logger.warning("the request field %s is unknown and ignored (said once)", shown(name))
