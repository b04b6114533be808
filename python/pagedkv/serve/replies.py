"""Answers to a request, whole or as a stream. Completions and chat differ only in their `Shape`."""

import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from pagedkv.outputs import SampleChange, TokenLogprobs
from pagedkv.request import Request
from pagedkv.serve.errors import ApiError, from_exception, internal_error
from pagedkv.serve.generation import Changes, Generation
from pagedkv.serve.middleware import request_id_of
from pagedkv.serve.protocol import GenerationRequest
from pagedkv.serve.served import SERVED
from pagedkv.serve.sse import DONE, Chunks, EventStream, event

logger = logging.getLogger("pagedkv.serve")

EXPLANATION = "cache_explanation"
"""The field that `explain_cache` asks for."""


@dataclass(frozen=True)
class Piece:
    """What is new of one sequence since the last piece.

    Attributes:
        index: which choice of the reply.
        text: new text; may be empty, as after the first half of a character.
        token_ids: new tokens.
        logprobs: one entry per new token, or None where not asked for.
        text_offsets: where the text of each new token begins in the whole answer; empty without logprobs.
        first: nothing was sent for this choice yet.
        finish_reason: why the sequence ended, None while it goes on.
        stop_reason: what ended it, where that was a stop string or a token of stop_token_ids.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    text_offsets: list[int]
    first: bool
    finish_reason: str | None
    stop_reason: str | int | None


class Shape(ABC):
    """How an endpoint words its replies."""

    id_prefix: str
    object: str
    chunk_object: str

    @abstractmethod
    def choice(self, piece: Piece) -> dict[str, Any]:
        """The choice of a whole reply; `piece` holds all of the sequence."""

    @abstractmethod
    def chunk(self, piece: Piece) -> dict[str, Any]:
        """The choice of one event of a stream."""


async def reply(
    http_request: web.Request, body: GenerationRequest, model: str, requests: Sequence[Request], shape: Shape
) -> web.StreamResponse:
    """Runs the requests and answers under the name `model`, in the way that the body asks for."""
    served = http_request.app[SERVED]
    reply_id = f"{shape.id_prefix}-{uuid.uuid4().hex}"
    head = {"id": reply_id, "created": int(time.time()), "model": model}
    served.reply_ids.add(requests[0].salt, request_id_of(http_request), reply_id)
    with Generation(served.engine, served.metrics, requests, reply_id) as generation:
        choices = [_Choice(index) for index in range(body.n * len(requests))]
        if body.stream:
            return await _stream(http_request, body, _Run(generation, choices, shape, head))
        async with aclosing(generation.changes()) as all_changes:
            async for changes in all_changes:
                for prompt_index, change in _flat(changes):
                    choices[prompt_index * body.n + change.index].add(change)
    whole: dict[str, Any] = {
        "id": head["id"],
        "object": shape.object,
        "created": head["created"],
        "model": model,
        "choices": [shape.choice(choice.take()) for choice in choices],
        "usage": _usage(generation, choices),
    }
    if body.explain_cache:
        whole[EXPLANATION] = await generation.explanations()
    return web.json_response(whole)


@dataclass
class _Choice:
    """One sequence of a reply: how much of it has come, and what has not been taken yet."""

    index: int
    num_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    _texts: list[str] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _logprobs: list[TokenLogprobs] | None = None
    _text_offsets: list[int] = field(default_factory=list)
    _begun: bool = False

    def add(self, change: SampleChange) -> None:
        """Takes in what is new. Raises ApiError where the server itself ended the sequence."""
        if change.finish_reason == "abort":
            raise ApiError(503, "The request was aborted by the server.", code="aborted")
        self.num_tokens += len(change.token_ids)
        self.finish_reason, self.stop_reason = change.finish_reason, change.stop_reason
        if change.text:
            self._texts.append(change.text)
        self._token_ids += change.token_ids
        if change.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += change.logprobs
            self._text_offsets += change.text_offsets or []

    @property
    def has_news(self) -> bool:
        """Whether an event is worth its while.

        The first token shows at once, even if it has no text yet; after that an event without text says
        nothing.
        """
        return bool(self._texts or self.finish_reason or (self._token_ids and not self._begun))

    def take(self) -> Piece:
        """What has come since the last call."""
        text, token_ids, logprobs = "".join(self._texts), self._token_ids, self._logprobs
        text_offsets = self._text_offsets
        piece = Piece(
            self.index,
            text,
            token_ids,
            logprobs,
            text_offsets,
            not self._begun,
            self.finish_reason,
            self.stop_reason,
        )
        self._begun = True
        self._texts, self._token_ids, self._text_offsets = [], [], []
        self._logprobs = None if logprobs is None else []
        return piece


@dataclass(frozen=True)
class _Run:
    """A reply on its way."""

    generation: Generation
    choices: list[_Choice]
    shape: Shape
    head: dict[str, Any]


def _flat(changes: Changes) -> Iterator[tuple[int, SampleChange]]:
    return ((prompt_index, change) for prompt_index, news in changes for change in news)


def _usage(generation: Generation, choices: Sequence[_Choice]) -> dict[str, Any]:
    """Token counts over all prompts, as far as the reply has come."""
    prompt_tokens = generation.num_prompt_tokens
    completion_tokens = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
    }


async def _stream(http_request: web.Request, body: GenerationRequest, run: _Run) -> web.StreamResponse:
    """Sends events until the end. An error before the first one keeps its status; a later one is an event."""
    stream = EventStream(http_request, {})
    try:
        return await _send_events(stream, body, run)
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


async def _send_events(stream: EventStream, body: GenerationRequest, run: _Run) -> web.StreamResponse:
    options = body.stream_options
    wants_usage = options is not None and options.include_usage
    wants_running_usage = options is not None and wants_usage and options.continuous_usage_stats
    chunks = Chunks({**run.head, "object": run.shape.chunk_object})
    async with aclosing(run.generation.changes()) as all_changes:
        async for changes in all_changes:
            events = b""
            for prompt_index, change in _flat(changes):
                choice = run.choices[prompt_index * body.n + change.index]
                choice.add(change)
                if not choice.has_news:
                    continue
                chunk: dict[str, Any] = {"choices": [run.shape.chunk(choice.take())]}
                if wants_usage:
                    chunk["usage"] = _usage(run.generation, run.choices) if wants_running_usage else None
                events += chunks.event(chunk)
            if events:
                await stream.send(events)
    last: dict[str, Any] = {}
    if wants_usage:
        last["usage"] = _usage(run.generation, run.choices)
    if body.explain_cache:
        last[EXPLANATION] = await run.generation.explanations()
    events = chunks.event({"choices": [], **last}) if last else b""
    return await stream.close(events + DONE)
