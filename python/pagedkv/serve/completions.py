"""POST /v1/completions."""

from typing import Any

from aiohttp import web

from pagedkv.serve import logprobs
from pagedkv.serve.bodies import read_request
from pagedkv.serve.prompts import completion_requests
from pagedkv.serve.protocol import CompletionRequest
from pagedkv.serve.replies import Piece, Shape, reply
from pagedkv.serve.served import SERVED
from pagedkv.serve.tenancy import namespace_of


class CompletionShape(Shape):
    """`text_completion` objects; the events of a stream look like whole replies."""

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, num_logprobs: int | None) -> None:
        self._num_logprobs = num_logprobs

    def choice(self, piece: Piece) -> dict[str, Any]:
        """Text, reason of the end and log-probabilities."""
        shown = None
        if self._num_logprobs is not None and piece.logprobs is not None:
            shown = logprobs.for_completion(
                piece.token_ids, piece.logprobs, self._num_logprobs, piece.text_offsets
            )
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": shown,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """The same fields, of what is new."""
        return self.choice(piece)


async def create_completion(http_request: web.Request) -> web.StreamResponse:
    """Continues one or more prompts."""
    served = http_request.app[SERVED]
    body = await read_request(http_request, CompletionRequest)
    model = served.name_for(body.model)
    requests = await completion_requests(served, body, namespace_of(http_request, body.cache_salt))
    return await reply(http_request, body, model, requests, CompletionShape(body.num_logprobs))
