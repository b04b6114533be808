"""What happens to every request around its handler: an id, the key, errors as JSON, CORS, a count.

Headers are added when the response is about to leave (`on_response_prepare`): a stream has left by the time
that its handler returns.
"""

import hmac
import logging
import re
import uuid

from aiohttp import web
from aiohttp.typedefs import Handler

from pagedkv.serve.errors import ApiError, from_exception, internal_error
from pagedkv.serve.served import SERVED

logger = logging.getLogger("pagedkv.serve")

API_KEY = web.RequestKey("api_key", str)
REQUEST_ID = web.RequestKey("request_id", str)
IGNORED = web.RequestKey("ignored", tuple[str, ...])

_ACCEPTED_ID = re.compile(r"[\x21-\x7e]{1,128}")
# A header must stay a header, whatever names a client made up.
_MAX_IGNORED_NAMES = 32
_MAX_NAME_CHARS = 64
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_\-, ]{1,4096}")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.\-]")


def request_id_of(request: web.BaseRequest) -> str:
    """The id of a request: the client's own where it is printable and short, else one of ours."""
    if REQUEST_ID not in request:
        given = request.headers.get("X-Request-Id", "")
        request[REQUEST_ID] = given if _ACCEPTED_ID.fullmatch(given) else uuid.uuid4().hex
    return request[REQUEST_ID]


@web.middleware
async def count_responses(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts what was answered, by the pattern of the route."""
    response = await handler(request)
    resource = request.match_info.route.resource
    address = resource.canonical if resource is not None else "other"
    request.app[SERVED].metrics.count_response(address, request.method, response.status)
    return response


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns every exception into OpenAI's error object. A fault of our own is logged with its trace."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        known = from_exception(error)
    except Exception as error:
        known = from_exception(error)
        if known is None:
            logger.exception("request %s failed", request_id_of(request))
    return (known or internal_error(request_id_of(request))).response()


@web.middleware
async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers a browser's question before the request proper; it never carries a key."""
    if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
        return web.Response(status=204)
    return await handler(request)


@web.middleware
async def require_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Asks for a key on /v1/* where some are configured; probes and scrapers need none."""
    keys = request.app[SERVED].options.api_keys
    if not keys or not request.path.startswith("/v1/"):
        return await handler(request)
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    given = [token.strip()] if scheme.lower() == "bearer" else []
    given += [request.headers[name] for name in ("api-key", "x-api-key") if name in request.headers]
    # compare_digest takes the same time wherever the two differ. Bytes that are no text arrive as surrogates.
    sent = [one.encode(errors="surrogateescape") for one in given]
    found = [key for key in keys for one in sent if hmac.compare_digest(one, key.encode())]
    if not found:
        message = "The API key is missing or wrong. Send it as 'Authorization: Bearer KEY'."
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
    request[API_KEY] = found[0]
    return await handler(request)


async def add_headers(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Adds the request id, the ignored fields and what a browser needs, to streams as well."""
    headers = response.headers
    headers["X-Request-Id"] = request_id_of(request)
    ignored = request.get(IGNORED)
    if ignored:
        headers["x-pagedkv-ignored"] = ",".join(map(_header_name, ignored[:_MAX_IGNORED_NAMES]))
    headers["Access-Control-Allow-Origin"] = "*"
    headers["Access-Control-Expose-Headers"] = "x-request-id, x-pagedkv-ignored, retry-after"
    if request.method == "OPTIONS":
        headers["Access-Control-Allow-Methods"] = "GET, POST, HEAD, OPTIONS"
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        headers["Access-Control-Allow-Headers"] = wanted if _HEADER_NAMES.fullmatch(wanted) else "*"
        headers["Access-Control-Max-Age"] = "86400"


def _header_name(name: str) -> str:
    return _NOT_IN_NAMES.sub("?", name[:_MAX_NAME_CHARS])
