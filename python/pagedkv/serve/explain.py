"""GET /v1/cache/explain/{request id}: why a prompt was found in the cache as far as it was."""

from typing import TYPE_CHECKING, Any

from aiohttp import web

from pagedkv.serve.errors import ApiError, refuse, shown
from pagedkv.serve.served import SERVED
from pagedkv.serve.tenancy import namespace_of

if TYPE_CHECKING:
    from pagedkv.async_llm import AsyncLLM


def name_of(reply_id: str, index: int) -> str:
    """What the engine calls a prompt of a request that may have several."""
    return reply_id if index == 0 else f"{reply_id}/{index}"


async def explanation(
    engine: "AsyncLLM", salt: bytes, reply_id: str, index: int = 0
) -> dict[str, Any] | None:
    """The object for one prompt of a request; None where nothing is known about it (any more)."""
    found = await engine.explain(name_of(reply_id, index), salt=salt)
    return None if found is None else found.as_json(reply_id)


async def show_explanation(request: web.Request) -> web.Response:
    """By the id of a reply, or its X-Request-Id. `?prompt=1` names the second of several prompts."""
    reply_id, index = request.match_info["id"], request.query.get("prompt", "0")
    if not index.isdecimal() or len(index) > 4:
        refuse("prompt", f"prompt must be the number of a prompt, 0 for the first one, got {shown(index)}.")
    served, salt = request.app[SERVED], namespace_of(request)
    reply_id = served.reply_ids.find(salt, reply_id) or reply_id
    found = await explanation(served.engine, salt, reply_id, int(index))
    if found is None:
        message = (
            f"Nothing is known about the request {shown(reply_id)}: it is not this tenant's, its prompt does "
            "not run yet, or it is too long ago."
        )
        raise ApiError(404, message, param="id", code="request_not_found")
    return web.json_response(found)
