"""Server-sent events, in the narrow form that all known clients can read.

One event is `data: `, one line of JSON, and two line feeds: no ids, no comments, no pings, no carriage
returns. The body ends together with `data: [DONE]`, because some clients wait for the end of the body
before they reuse the connection.
"""

import json
from typing import Any

from aiohttp import web

DONE = b"data: [DONE]\n\n"

_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    # Tells nginx, and those who took over its header, to pass the events on as they come.
    "X-Accel-Buffering": "no",
}


def event(data: dict[str, Any]) -> bytes:
    """One event.

    Everything but ASCII is escaped: some clients split lines at U+2028 or U+0085 too, which JSON may hold
    raw.
    """
    return b"data: " + json.dumps(data, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n\n"


class EventStream:
    """A streamed response. The headers leave with the first events, so an early error keeps its status."""

    def __init__(self, request: web.Request, headers: dict[str, str]) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=_HEADERS | headers)

    @property
    def begun(self) -> bool:
        """Whether the status is on its way, so that an error can only be told as an event."""
        return self.response.prepared

    async def send(self, events: bytes) -> None:
        """Writes events; returns when the connection's buffer has room again."""
        await self._prepare()
        await self.response.write(events)

    async def close(self, events: bytes) -> web.StreamResponse:
        """Writes the last events and the end of the body, in one piece."""
        await self._prepare()
        await self.response.write_eof(events)
        return self.response

    async def _prepare(self) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
