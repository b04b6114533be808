"""An engine without a model, for tests of the HTTP side: deterministic answers, one byte per token.

It has the parts of `AsyncLLM` that the server uses. Knobs make it slow, full, failing or dead.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from pagedkv.config import EngineConfig
from pagedkv.errors import EngineDead, QueueFull, RequestFailed
from pagedkv.outputs import FinishReason, Logprob, RequestMetrics, SampleChange
from pagedkv.request import Limits, Prompt, Request, make_request
from pagedkv.sampling_params import SamplingParams
from pagedkv.serve.app import build_app
from pagedkv.serve.served import ServeOptions
from pagedkv.text import ChatTemplateError, Tokenizer

EOS = 256
VOCAB_SIZE = 5000
STAT_NAMES = """
    steps scheduled_tokens prompt_tokens generation_tokens discarded_tokens void_rows
    prefix_queries prefix_hits recomputed_tokens preemptions swapped_out_blocks swapped_in_blocks
    swapped_in_tokens evictions copies finished_stop finished_length finished_abort finished_error
    num_running num_waiting blocks_total blocks_free blocks_idle blocks_owned blocks_fenced wasted_slots
    blocks_pinned blocks_promised blocks_pin_budget host_blocks_total host_blocks_used num_swapped num_pins
    num_sessions
"""
ANSWER = "Grüße \U0001f9ea {index} of {prompt}. "


class FakeTokenizer:
    """Bytes are tokens. A template that shows its parts."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token for token in token_ids if token < EOS).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < EOS else b"<eos>"

    def fewest_tokens(self, text: str) -> int:
        return len(text.encode(errors="surrogatepass")) if len(text) >= 4096 else 0

    def chat_text(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: object = None,
        **template_kwargs: Any,
    ) -> str:
        if template_kwargs.get("refuse"):
            raise ChatTemplateError("roles must alternate")
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        if any("tool_calls" in message for message in messages):
            text += json.dumps([message.get("tool_calls") for message in messages])
        text += "<assistant>" if add_generation_prompt else ""
        return text + ("<no thoughts>" if template_kwargs.get("enable_thinking") is False else "")


@dataclass
class FakeSample:
    """One answer: its bytes, one of which is shown per step."""

    index: int
    planned: list[int]
    request: Request
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_taken: int = 0
    num_chars_taken: int = 0
    took_end: bool = False

    def step(self) -> None:
        if self.finish_reason is not None:
            return
        params = self.request.params
        self.token_ids.append(self.planned[len(self.token_ids)])
        for stop in params.stop or ():
            if stop in bytes(self.token_ids).decode(errors="ignore"):
                self.finish_reason, self.stop_reason = "stop", stop
        if self.token_ids[-1] in params.stop_ids:
            self.finish_reason, self.stop_reason = "stop", self.token_ids[-1]
        elif self.finish_reason is None and len(self.token_ids) == self.request.max_tokens:
            self.finish_reason = "length"

    def text(self) -> str:
        """What is certain by now."""
        text = bytes(self.token_ids).decode(errors="ignore" if self.finish_reason is None else "replace")
        if self.finish_reason == "stop" and isinstance(self.stop_reason, str):
            return text[: text.index(self.stop_reason)]
        if self.finish_reason is None and self.request.params.stop:
            # Holds back whatever could still become a stop string, in the simplest way.
            longest = max(map(len, self.request.params.stop))
            return text[: max(0, len(text) - longest + 1)]
        return text

    def take_change(self) -> SampleChange | None:
        text, token_ids = self.text()[self.num_chars_taken :], self.token_ids[self.num_taken :]
        ended = self.finish_reason is not None
        if self.took_end or not (text or token_ids or ended):
            return None
        self.num_chars_taken += len(text)
        self.num_taken += len(token_ids)
        self.took_end = ended
        logprobs = text_offsets = None
        if self.request.params.logprobs is not None:
            start = self.num_taken - len(token_ids)
            logprobs = [self._logprobs(token_id) for token_id in token_ids]
            text_offsets = [self._offset(start + place) for place in range(len(token_ids))]
        return SampleChange(
            self.index, text, token_ids, logprobs, self.finish_reason, self.stop_reason, text_offsets
        )

    def _offset(self, num_tokens: int) -> int:
        return len(bytes(self.token_ids[:num_tokens]).decode(errors="ignore"))

    def _logprobs(self, token_id: int) -> dict[int, Logprob]:
        most = self.request.params.logprobs or 0
        ranked = [token_id, *(other for other in range(65, 91) if other != token_id)][: max(most, 1)]
        entry = {}
        for place, other in enumerate(ranked, start=1):
            text = bytes([other]).decode(errors="replace")
            entry[other] = Logprob(-0.25 * place, place if most else None, text)
        return entry


class FakeStream:
    """What the server reads of a stream of `AsyncLLM`; steps that nobody waited for are joined."""

    def __init__(self, engine: "FakeEngine", request: Request, request_id: str) -> None:
        self.engine = engine
        self.request = request
        self.request_id = request_id
        self.metrics = RequestMetrics(request.arrival_time)
        name = engine.tokenizer.decode(request.prompt_token_ids[:4])
        self.samples = []
        for index in range(request.params.n):
            answer = ANSWER.format(index=index, prompt=name).encode()
            planned = list(answer * (1 + request.max_tokens // len(answer)))
            self.samples.append(FakeSample(index, planned, request))
        self.error: Exception | None = None
        self.news = asyncio.Event()
        self.task = asyncio.create_task(self.run())

    @property
    def num_cached_tokens(self) -> int:
        return self.engine.num_cached_tokens

    @property
    def finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    async def run(self) -> None:
        try:
            while not self.finished:
                await asyncio.sleep(self.engine.step_s)
                now = time.monotonic()
                self.metrics.first_scheduled_time = self.metrics.first_scheduled_time or now
                for sample in self.samples:
                    sample.step()
                self.metrics.first_token_time = self.metrics.first_token_time or now
                self.metrics.last_token_time = now
                num_tokens = len(self.samples[0].token_ids)
                if self.engine.fail_after is not None and num_tokens > self.engine.fail_after:
                    raise self.engine.failure
                if self.finished:
                    self.metrics.finished_time = now
                self.news.set()
        except Exception as error:
            self.error = error
        finally:
            self.engine.running.discard(self)
            self.news.set()

    async def changes(self) -> AsyncGenerator[list[SampleChange], None]:
        exhausted = False
        while not exhausted:
            await self.news.wait()
            self.news.clear()
            exhausted = self.finished
            if self.error is not None:
                raise self.error
            changes = [sample.take_change() for sample in self.samples]
            if any(changes):
                yield [change for change in changes if change is not None]

    def abort(self) -> None:
        if self in self.engine.running:
            self.engine.running.discard(self)
            self.engine.aborted.append(self)
            self.task.cancel()


@dataclass
class FakeEngine:
    """The parts of `AsyncLLM` that the server uses.

    Attributes:
        step_s: seconds per token.
        capacity: requests in flight at most.
        fail_after: number of tokens after which every request raises `failure`.
        submitted: every request that came, in order.
        aborted: those that were ended early.
    """

    max_model_len: int = 4096
    step_s: float = 0.0
    capacity: int = 10_000
    fail_after: int | None = None
    failure: Exception = field(default_factory=lambda: RequestFailed("the step failed"))
    dead: bool = False
    heartbeat_age: float = 0.0
    num_cached_tokens: int = 0
    submitted: list[FakeStream] = field(default_factory=list)
    running: set[FakeStream] = field(default_factory=set)
    aborted: list[FakeStream] = field(default_factory=list)
    was_shut_down: bool = False
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    config: EngineConfig = field(default_factory=EngineConfig)

    @property
    def is_alive(self) -> bool:
        return not self.dead

    @property
    def num_in_flight(self) -> int:
        return len(self.running)

    def stats(self) -> dict[str, int]:
        stats = dict.fromkeys(STAT_NAMES.split(), 0)
        in_use = {
            "blocks_total": 100,
            "blocks_free": 60,
            "blocks_idle": 10,
            "blocks_owned": 25,
            "blocks_fenced": 5,
        }
        return stats | in_use | {"num_running": len(self.running), "prefix_hits": 3, "prefix_queries": 7}

    def prepare(self, prompt: Prompt, sampling_params: SamplingParams, **options: Any) -> Request:
        limits = Limits(self.max_model_len, VOCAB_SIZE)
        return make_request(prompt, sampling_params, cast(Tokenizer, self.tokenizer), limits, **options)

    def submit(self, request: Request, *, request_id: str | None = None) -> FakeStream:
        if self.dead:
            raise EngineDead("the engine's thread died")
        if len(self.running) >= self.capacity:
            raise QueueFull(f"{self.capacity} requests are in flight; try again later")
        stream = FakeStream(self, request, str(len(self.submitted)))
        self.submitted.append(stream)
        self.running.add(stream)
        return stream

    async def shutdown(self) -> None:
        self.was_shut_down = True


@asynccontextmanager
async def serving(
    engine: Any,
    *,
    names: tuple[str, ...] = ("mock",),
    strict: bool = False,
    api_keys: tuple[str, ...] = (),
    keys_are_tenants: bool | None = None,
    tenant_keys: frozenset[str] = frozenset(),
    keeps_engine: bool = False,
) -> AsyncIterator[TestClient]:
    """A client of a server around `engine`, set up as `python -m pagedkv.serve` does it.

    `keeps_engine`: the engine outlives its server, so that its state can be looked at afterwards.
    """
    are_tenants = len(api_keys) > 1 if keys_are_tenants is None else keys_are_tenants
    app = build_app(engine, ServeOptions(names, "mock-root", strict, api_keys, are_tenants, tenant_keys))
    if keeps_engine:
        app.on_shutdown.clear()
    async with TestClient(TestServer(app)) as client:
        yield client


async def answer_of(response: ClientResponse, status: int = 200) -> dict[str, Any]:
    """The object in a response, which must have this status."""
    assert response.status == status, await response.text()
    return dict(await response.json())


async def post(client: TestClient, path: str, headers: Any = None, **fields: Any) -> dict[str, Any]:
    """The object that answers a body with these fields."""
    return await answer_of(await client.post(path, json=fields, headers=headers))


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end with [DONE]."""
    parts = body.split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""]
    return [json.loads(part.removeprefix(b"data: ")) for part in parts[:-2]]
