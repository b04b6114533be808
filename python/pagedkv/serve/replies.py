"""Answers to a request, whole or as a stream. Completions and chat differ only in their `Shape`."""

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from pagedkv.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from pagedkv.sampling_params import SamplingParams
from pagedkv.serve.errors import ApiError, from_exception, internal_error
from pagedkv.serve.generation import Generation, Submission
from pagedkv.serve.middleware import request_id_of
from pagedkv.serve.prompts import max_tokens_for
from pagedkv.serve.protocol import GenerationRequest
from pagedkv.serve.served import SERVED
from pagedkv.serve.sse import DONE, EventStream, event

logger = logging.getLogger("pagedkv.serve")


@dataclass(frozen=True)
class Piece:
    """What is new of one sequence since the last piece.

    Attributes:
        index: which choice of the reply.
        text: new text; may be empty, as after the first half of a character.
        token_ids: new tokens.
        logprobs: one entry per new token, or None where not asked for.
        offset: length of the texts of all tokens before.
        first: nothing was sent for this choice yet.
        answer: the sequence as a whole.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    offset: int
    first: bool
    answer: CompletionOutput


class Shape(ABC):
    """How an endpoint words its replies."""

    id_prefix: str
    object: str
    chunk_object: str
    default_max_tokens: int | None

    @abstractmethod
    def choice(self, piece: Piece) -> dict[str, Any]:
        """The choice of a whole reply; `piece` holds all of the sequence."""

    @abstractmethod
    def chunk(self, piece: Piece) -> dict[str, Any]:
        """The choice of one event of a stream."""


async def reply(
    http_request: web.Request, request: GenerationRequest, prompts: Sequence[list[int]], shape: Shape
) -> web.StreamResponse:
    """Runs the prompts and answers, in the way that the request asks for."""
    served = http_request.app[SERVED]
    model = served.name_for(request.model)
    submissions = []
    for token_ids in prompts:
        limit = max_tokens_for(served, len(token_ids), request.token_limit, shape.default_max_tokens)
        # The engine's id is always ours: two clients may well choose the same one.
        submissions.append(Submission(uuid.uuid4().hex, token_ids, _params(request, limit)))
    salt = (request.cache_salt or "").encode()
    head = {"id": f"{shape.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
    with Generation(served.engine, served.metrics, submissions, salt) as generation:
        if request.stream:
            return await _stream(http_request, request, generation, shape, head)
        outputs = await generation.outputs()
    pieces = [
        piece for index, output in enumerate(outputs) for piece in _Progress(request.n, index).news(output)
    ]
    body = {
        "id": head["id"],
        "object": shape.object,
        "created": head["created"],
        "model": model,
        "choices": [shape.choice(piece) for piece in pieces],
        "usage": usage(outputs),
    }
    return web.json_response(body)


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Token counts over all prompts. A prompt with n sequences counts once."""
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    completion_tokens = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def _params(request: GenerationRequest, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        n=request.n,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed,
        max_tokens=max_tokens,
        stop=request.stop,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=request.ignore_eos,
        logprobs=request.num_logprobs,
        skip_special_tokens=request.skip_special_tokens,
        include_stop_str_in_output=request.include_stop_str_in_output,
    )


@dataclass
class _Sent:
    """How much of one sequence has left already."""

    num_chars: int = 0
    num_tokens: int = 0
    offset: int = 0
    begun: bool = False
    ended: bool = False


@dataclass
class _Progress:
    """How much of one prompt's sequences has left already, and what is new in an output."""

    n: int
    prompt_index: int
    sent: dict[int, _Sent] = field(default_factory=dict)

    def news(self, output: RequestOutput) -> list[Piece]:
        """The pieces to send now; at most one per sequence."""
        pieces = (
            self._piece(answer, self.sent.setdefault(answer.index, _Sent())) for answer in output.outputs
        )
        return [piece for piece in pieces if piece is not None]

    def _piece(self, answer: CompletionOutput, sent: _Sent) -> Piece | None:
        ended = answer.finish_reason is not None
        if answer.finish_reason == "abort":
            raise ApiError(503, "The request was aborted by the server.", code="aborted")
        text = answer.text[sent.num_chars :]
        # The first token shows at once, even if it has no text yet; after that an event without text says
        # nothing.
        if sent.ended or not (ended or text or (answer.token_ids and not sent.begun)):
            return None
        token_ids = answer.token_ids[sent.num_tokens :]
        logprobs = None if answer.logprobs is None else answer.logprobs[sent.num_tokens :]
        index = self.prompt_index * self.n + answer.index
        piece = Piece(index, text, token_ids, logprobs, sent.offset, not sent.begun, answer)
        sent.begun, sent.ended = True, ended
        sent.num_chars, sent.num_tokens = len(answer.text), len(answer.token_ids)
        for token_id, entry in zip(token_ids, logprobs or (), strict=False):
            sent.offset += len(entry[token_id].decoded_token)
        return piece


async def _stream(
    http_request: web.Request,
    request: GenerationRequest,
    generation: Generation,
    shape: Shape,
    head: dict[str, Any],
) -> web.StreamResponse:
    """Sends events until the end. An error before the first one keeps its status; a later one is an event."""
    stream = EventStream(http_request, {})
    try:
        return await _send_events(stream, request, generation, shape, head)
    except ConnectionError:
        # The client is gone; leaving the generation frees its blocks.
        return stream.response
    except Exception as error:
        if not stream.begun:
            raise
        known = from_exception(error)
        if known is None:
            logger.exception("request %s failed in its stream", request_id_of(http_request))
            known = internal_error(request_id_of(http_request))
        return await _close_after_error(stream, known)


async def _close_after_error(stream: EventStream, error: ApiError) -> web.StreamResponse:
    try:
        return await stream.close(event(error.body()))
    except ConnectionError:
        return stream.response


async def _send_events(
    stream: EventStream,
    request: GenerationRequest,
    generation: Generation,
    shape: Shape,
    head: dict[str, Any],
) -> web.StreamResponse:
    options = request.stream_options
    wants_usage = options is not None and options.include_usage
    wants_running_usage = options is not None and wants_usage and options.continuous_usage_stats
    chunk_head = {**head, "object": shape.chunk_object}
    progress = [_Progress(request.n, index) for index in range(generation.num_prompts)]
    latest: dict[int, RequestOutput] = {}
    async with aclosing(generation.changes()) as all_changes:
        async for changes in all_changes:
            events = b""
            latest.update(changes)
            for prompt_index, output in changes:
                for piece in progress[prompt_index].news(output):
                    chunk = {**chunk_head, "choices": [shape.chunk(piece)]}
                    if wants_usage:
                        chunk["usage"] = usage(list(latest.values())) if wants_running_usage else None
                    events += event(chunk)
            if events:
                await stream.send(events)
    last = b""
    if wants_usage:
        last = event({**chunk_head, "choices": [], "usage": usage(list(latest.values()))})
    return await stream.close(last + DONE)
