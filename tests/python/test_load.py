"""A thousand requests over 64 connections, a quarter of them cut off by their clients, in a small cache.

Every other answer must be complete and equal to its lone run. Where torch multiplies, whose results depend on
the batch, an answer may leave its lone run where the two best logits are closer than TIE.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from aiohttp.test_utils import TestClient
from prometheus_client.parser import text_string_to_metric_families

from fake_engine import events_of, serving
from pagedkv import AsyncLLM, SamplingParams
from pagedkv._core import cpu_isa
from tiny_llm import TIE, Checkpoint, at_rest, prompts

NUM_CONNECTIONS = 64
NUM_REQUESTS = 1000
NUM_LONE_RUNS = 100
NUM_BLOCKS = 150
BLOCK_SIZE = 4


@dataclass(frozen=True)
class LoneRun:
    """A request and its answer on an idle engine."""

    prompt: list[int]
    max_tokens: int
    text: str
    # Text after each token, and by how much that token's logit led.
    texts: list[str]
    margins: list[float]

    def fields(self) -> dict[str, object]:
        return {
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def check(self, text: str) -> bool:
        """Whether `text` is the whole answer. Else fails, unless torch multiplies and it leaves at a tie."""
        if text == self.text:
            return True
        assert cpu_isa() == "portable", f"{text!r} != {self.text!r}"
        parted = next(idx for idx, shown in enumerate(self.texts) if not text.startswith(shown))
        assert self.margins[parted] < TIE, (
            f"token {parted} led by {self.margins[parted]}: {text!r} != {self.text!r}"
        )
        return False


@asynccontextmanager
async def engine_on(checkpoint: Checkpoint, num_blocks: int) -> AsyncIterator[AsyncLLM]:
    options = checkpoint.options | {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "max_model_len": 256}
    async with AsyncLLM(**options, seed=7) as llm:
        yield llm


async def lone_runs(engine: AsyncLLM, vocab_size: int) -> list[LoneRun]:
    runs = []
    for idx, prompt in enumerate(prompts(NUM_LONE_RUNS, vocab_size, seed=11)):
        max_tokens = 1 + idx * 7 % 150
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
        texts = [""]
        async for output in engine.generate(prompt, params):
            sample = output.outputs[0]
            texts += [sample.text] * (len(sample.token_ids) + 1 - len(texts))
        assert sample.logprobs is not None
        leads = [
            sorted((entry.logprob for entry in token.values()), reverse=True) for token in sample.logprobs
        ]
        margins = [lead[0] - lead[1] for lead in leads]
        runs.append(LoneRun(prompt, max_tokens, sample.text, texts[1:], margins))
    return runs


async def read_answer(client: TestClient, run: LoneRun) -> str:
    response = await client.post("/v1/completions", json=run.fields())
    assert response.status == 200, await response.text()
    events = events_of(await response.read())
    assert events[-1]["usage"]["completion_tokens"] == run.max_tokens
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert [reason for reason in reasons if reason is not None] == ["length"]
    return "".join(choice["text"] for event in events for choice in event["choices"])


async def leave(client: TestClient, run: LoneRun, patience_s: float) -> None:
    """Closes the connection after some time or, however fast the engine is, some lines of the answer."""
    try:
        async with asyncio.timeout(patience_s):
            response = await client.post("/v1/completions", json=run.fields())
            for _ in range(int(100 * patience_s)):
                await response.content.readline()
    except TimeoutError:
        return
    response.close()


@pytest.mark.slow
async def test_answers_under_load_are_those_of_lone_runs(checkpoint: Checkpoint) -> None:
    async with engine_on(checkpoint, 400) as engine:
        runs = await lone_runs(engine, checkpoint.vocab_size)
    chance = random.Random(3)
    jobs: Iterator[tuple[LoneRun, bool, float]] = iter(
        [(chance.choice(runs), chance.random() < 0.25, chance.random() * 0.2) for _ in range(NUM_REQUESTS)]
    )
    whole: list[bool] = []
    wasted: list[float] = []
    async with engine_on(checkpoint, NUM_BLOCKS) as engine:

        async def connection(client: TestClient) -> None:
            for run, leaves, patience_s in jobs:
                if leaves:
                    await leave(client, run, patience_s)
                else:
                    whole.append(run.check(await read_answer(client, run)))

        async def watch() -> None:
            while True:
                stats = engine.stats()
                bound = BLOCK_SIZE * stats["num_running"]
                assert stats["wasted_slots"] < max(bound, 1), "at most one partly filled block a sequence"
                wasted.append(stats["wasted_slots"])
                await asyncio.sleep(0.05)

        async with serving(engine, keeps_engine=True) as client:
            watcher = asyncio.create_task(watch())
            await asyncio.gather(*(connection(client) for _ in range(NUM_CONNECTIONS)))
            assert not watcher.done(), watcher.exception()
            watcher.cancel()
            await at_rest(engine)
            metrics = {
                (sample.name, sample.labels.get("state")): sample.value
                for family in text_string_to_metric_families(await (await client.get("/metrics")).text())
                for sample in family.samples
            }
        stats = engine.stats()
    assert metrics["pagedkv:kv_blocks", "used"] == 0
    assert metrics["pagedkv:kv_blocks", "idle"] + metrics["pagedkv:kv_blocks", "free"] == NUM_BLOCKS
    assert stats["preemptions"] > 0, "the cache was meant to be too small"
    assert stats["finished_abort"] > NUM_REQUESTS / 20, "clients were meant to leave in time"
    assert len(whole) > NUM_REQUESTS * 0.6
    assert sum(whole) > 0.95 * len(whole), "ties are rare"
    assert max(wasted) > 0
