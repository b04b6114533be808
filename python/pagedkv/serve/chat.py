"""POST /v1/chat/completions."""

from collections.abc import Callable
from typing import Any

from aiohttp import web

from pagedkv.serve import logprobs
from pagedkv.serve.bodies import read_request
from pagedkv.serve.prompts import chat_request
from pagedkv.serve.protocol import ChatRequest
from pagedkv.serve.replies import Piece, Shape, reply
from pagedkv.serve.served import SERVED
from pagedkv.serve.tenancy import namespace_of


class ChatShape(Shape):
    """`chat.completion` objects, and `chat.completion.chunk` in a stream."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, num_logprobs: int | None, token_bytes: Callable[[int], bytes]) -> None:
        self._num_logprobs = num_logprobs
        self._token_bytes = token_bytes

    def choice(self, piece: Piece) -> dict[str, Any]:
        """The assistant's message."""
        return self._choice(piece, "message", {"role": "assistant", "content": piece.text})

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """What the message grew by. The role comes once: client libraries join whatever a delta repeats."""
        delta = {"role": "assistant", "content": piece.text} if piece.first else {"content": piece.text}
        return self._choice(piece, "delta", delta)

    def _choice(self, piece: Piece, name: str, message: dict[str, Any]) -> dict[str, Any]:
        shown = None
        if self._num_logprobs is not None and piece.logprobs is not None:
            num_top = self._num_logprobs
            shown = logprobs.for_chat(piece.token_ids, piece.logprobs, num_top, self._token_bytes)
        return {
            "index": piece.index,
            name: message,
            "logprobs": shown,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }


async def create_chat_completion(http_request: web.Request) -> web.StreamResponse:
    """Continues a conversation with the assistant's next turn."""
    served = http_request.app[SERVED]
    body = await read_request(http_request, ChatRequest)
    model = served.name_for(body.model)
    requests = await chat_request(served, body, namespace_of(http_request, body.cache_salt))
    shape = ChatShape(body.num_logprobs, served.engine.tokenizer.token_bytes)
    return await reply(http_request, body, model, requests, shape)
