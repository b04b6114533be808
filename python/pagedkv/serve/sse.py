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


# Everything but ASCII is escaped: some clients split lines at U+2028 or U+0085 too, which JSON may hold raw.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def event(data: dict[str, Any]) -> bytes:
    """One event."""
    return f"data: {_encode(data)}\n\n".encode("ascii")


class Chunks:
    """The events of one stream, whose common fields are encoded once: there is one for every token."""

    def __init__(self, head: dict[str, Any]) -> None:
        """Takes the fields that all events begin with; at least one."""
        self._begin = f"data: {_encode(head)[:-1]},"

    def event(self, fields: dict[str, Any]) -> bytes:
        """One event, with further fields; at least one."""
        return f"{self._begin}{_encode(fields)[1:]}\n\n".encode("ascii")


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
