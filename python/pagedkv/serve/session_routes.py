"""/v1/sessions: the conversations that requests with a session_id left behind."""

from typing import Any

from aiohttp import web

from pagedkv.holds import Session
from pagedkv.serve.bodies import read_request
from pagedkv.serve.cache_bodies import ForkRequest
from pagedkv.serve.served import SERVED
from pagedkv.serve.tenancy import namespace_of


async def list_sessions(http_request: web.Request) -> web.Response:
    """The tenant's sessions, the oldest first."""
    sessions = await http_request.app[SERVED].engine.sessions(salt=namespace_of(http_request))
    return web.json_response({"object": "list", "data": [_session(session) for session in sessions]})


async def show_session(http_request: web.Request) -> web.Response:
    """One session."""
    session_id = http_request.match_info["id"]
    session = await http_request.app[SERVED].engine.session(session_id, salt=namespace_of(http_request))
    return web.json_response(_session(session))


async def delete_session(http_request: web.Request) -> web.Response:
    """Forgets a session."""
    session_id = http_request.match_info["id"]
    await http_request.app[SERVED].engine.delete_session(session_id, salt=namespace_of(http_request))
    return web.json_response({"id": session_id, "object": "session", "deleted": True})


async def fork_session(http_request: web.Request) -> web.Response:
    """A second session with the same tokens, which shares the blocks of the first."""
    has_body = bool((await http_request.read()).strip())
    body = await read_request(http_request, ForkRequest) if has_body else ForkRequest()
    salt = namespace_of(http_request, body.cache_salt)
    session_id = http_request.match_info["id"]
    fork = await http_request.app[SERVED].engine.fork_session(session_id, body.id, body.ttl, salt=salt)
    return web.json_response(_session(fork))


def _session(session: Session) -> dict[str, Any]:
    # Not `asdict`, which is slow where there are thousands in a list.
    return {
        "object": "session",
        "id": session.id,
        "tokens": session.tokens,
        "blocks": session.blocks,
        "expires_at": session.expires_at,
    }
