"""An engine without a model, for tests of the HTTP side: deterministic answers, one byte per token.

It has the parts of `AsyncLLM` that the server uses. Knobs make it slow, full, failing or dead.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

from aiohttp.test_utils import TestClient, TestServer

from pagedkv.config import EngineConfig
from pagedkv.errors import EngineDead, InvalidRequest, QueueFull, RequestFailed
from pagedkv.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from pagedkv.sampling_params import SamplingParams
from pagedkv.serve.app import build_app
from pagedkv.serve.served import ServeOptions
from pagedkv.text.errors import ChatTemplateError

EOS = 256
VOCAB_SIZE = 5000
STAT_NAMES = """
    steps scheduled_tokens prompt_tokens generation_tokens prefix_queries prefix_hits recomputed_tokens
    preemptions evictions copies finished_stop finished_length finished_abort finished_error num_running
    num_waiting blocks_total blocks_free blocks_idle blocks_owned blocks_fenced wasted_slots
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

    def chat_prompt(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: object = None,
        **template_kwargs: Any,
    ) -> list[int]:
        if template_kwargs.get("refuse"):
            raise ChatTemplateError("roles must alternate")
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        if any("tool_calls" in message for message in messages):
            text += json.dumps([message.get("tool_calls") for message in messages])
        return self.encode(text + ("<assistant>" if add_generation_prompt else ""))


@dataclass
class FakeSample:
    """One answer: its bytes, one of which is shown per step."""

    index: int
    planned: list[int]
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def step(self) -> None:
        if self.finish_reason is not None:
            return
        self.token_ids.append(self.planned[len(self.token_ids)])
        for stop in self.params.stop_strings:
            if stop in bytes(self.token_ids).decode(errors="ignore"):
                self.finish_reason, self.stop_reason = "stop", stop
        if self.token_ids[-1] in self.params.stop_ids:
            self.finish_reason, self.stop_reason = "stop", self.token_ids[-1]
        elif self.finish_reason is None and len(self.token_ids) == self.params.max_tokens:
            self.finish_reason = "length"

    def output(self) -> CompletionOutput:
        text = bytes(self.token_ids).decode(errors="ignore" if self.finish_reason is None else "replace")
        if self.finish_reason == "stop" and isinstance(self.stop_reason, str):
            text = text[: text.index(self.stop_reason)]
        elif self.finish_reason is None and self.params.stop_strings:
            # Holds back whatever could still become a stop string, in the simplest way.
            longest = max(map(len, self.params.stop_strings))
            text = text[: max(0, len(text) - longest + 1)]
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = [self._logprobs(token_id) for token_id in self.token_ids]
        return CompletionOutput(
            self.index, text, list(self.token_ids), self.finish_reason, self.stop_reason, logprobs
        )

    def _logprobs(self, token_id: int) -> dict[int, Logprob]:
        most = self.params.logprobs or 0
        ranked = [token_id, *(other for other in range(65, 91) if other != token_id)][: max(most, 1)]
        entry = {}
        for place, other in enumerate(ranked, start=1):
            text = bytes([other]).decode(errors="replace")
            entry[other] = Logprob(-0.25 * place, place if most else None, text)
        return entry


class FakeStream:
    """What `AsyncLLM.submit` gives; steps that nobody waited for are joined."""

    def __init__(
        self, engine: "FakeEngine", prompt: list[int], params: SamplingParams, request_id: str
    ) -> None:
        self.engine = engine
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.metrics = RequestMetrics(time.monotonic())
        name = engine.tokenizer.decode(prompt[:4])
        self.samples = []
        for index in range(params.n):
            answer = ANSWER.format(index=index, prompt=name).encode()
            planned = list(answer * (1 + (params.max_tokens or 0) // len(answer)))
            self.samples.append(FakeSample(index, planned, params))
        self.error: Exception | None = None
        self.news = asyncio.Event()
        self.exhausted = False
        self.task = asyncio.create_task(self.run())

    @property
    def finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    async def run(self) -> None:
        try:
            while not self.finished:
                await asyncio.sleep(self.engine.step_s)
                self.metrics.first_scheduled_time = self.metrics.first_scheduled_time or time.monotonic()
                for sample in self.samples:
                    sample.step()
                self.metrics.first_token_time = self.metrics.first_token_time or time.monotonic()
                num_tokens = len(self.samples[0].token_ids)
                if self.engine.fail_after is not None and num_tokens > self.engine.fail_after:
                    raise self.engine.failure
                self.news.set()
            self.metrics.finished_time = time.monotonic()
        except Exception as error:
            self.error = error
        finally:
            self.engine.running.discard(self)
            self.news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.exhausted:
            raise StopAsyncIteration
        await self.news.wait()
        self.news.clear()
        self.exhausted = self.finished
        if self.error is not None:
            raise self.error
        outputs = [sample.output() for sample in self.samples]
        cached = self.engine.num_cached_tokens
        return RequestOutput(self.request_id, None, self.prompt, outputs, self.finished, cached, self.metrics)

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
    salts: list[bytes] = field(default_factory=list)
    running: set[FakeStream] = field(default_factory=set)
    aborted: list[FakeStream] = field(default_factory=list)
    was_shut_down: bool = False
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    config: EngineConfig = field(default_factory=EngineConfig)
    model_config: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(vocab_size=VOCAB_SIZE))

    @property
    def is_alive(self) -> bool:
        return not self.dead

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

    def submit(
        self, prompt: list[int], params: SamplingParams, request_id: str, *, salt: bytes = b""
    ) -> FakeStream:
        if self.dead:
            raise EngineDead("the engine's thread died")
        if len(self.running) >= self.capacity:
            raise QueueFull(f"{self.capacity} requests are in flight.")
        if len(prompt) + (params.max_tokens or 1) > self.max_model_len:
            raise InvalidRequest("the server should have seen that this is too long")
        stream = FakeStream(self, prompt, params, request_id)
        self.submitted.append(stream)
        self.running.add(stream)
        self.salts.append(salt)
        return stream

    async def shutdown(self) -> None:
        self.was_shut_down = True


@asynccontextmanager
async def serving(
    engine: Any, *, names: tuple[str, ...] = ("mock",), strict: bool = False, api_key: str | None = None
) -> AsyncIterator[TestClient]:
    """A client of a server around `engine`, set up as `python -m pagedkv.serve` does it."""
    options = ServeOptions(names, "mock-root", strict, api_key)
    server = TestServer(build_app(engine, options))
    async with TestClient(server) as client:
        yield client


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end with [DONE]."""
    parts = body.split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""]
    return [json.loads(part.removeprefix(b"data: ")) for part in parts[:-2]]
