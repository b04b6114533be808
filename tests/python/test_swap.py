"""Preempted sequences in host memory: equal answers, fewer tokens computed again, options, /metrics."""

import asyncio
import logging
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

from fake_engine import serving
from pagedkv import LLM, AsyncLLM, SamplingParams, _core, loading
from pagedkv.batch import arena_section
from pagedkv.kv_cache import HostCache, KVCache
from pagedkv.ops import cpu, reference
from pagedkv.swap import HostSwap
from tiny_llm import Checkpoint, Greedy, assert_at_rest, at_rest, check_all, prompts

# Of four tokens, at 512 bytes a token.
BLOCK_GIB = 2048 / 2**30
MOVING_IS_CHEAPER = (50_000, 1)


@pytest.fixture(autouse=True)
def fixed_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same decisions in every run; unused memory is NaN."""
    monkeypatch.setattr(loading, "measure", lambda *_args, **_: MOVING_IS_CHEAPER)
    monkeypatch.setenv("PAGEDKV_POISON", "1")


def tight(checkpoint: Checkpoint, num_host_blocks: int) -> dict[str, Any]:
    """Options of a pool that preempts."""
    sizes = {"num_blocks": 36, "max_model_len": None, "block_size": 4}
    return checkpoint.options | sizes | {"swap_space": num_host_blocks * BLOCK_GIB}


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("max_num_batched_tokens", [7, 512])
def test_answers_are_those_of_an_engine_that_computes_again(
    checkpoint: Checkpoint,
    expected: list[Greedy],
    max_num_batched_tokens: int,
    enable_prefix_caching: bool,
) -> None:
    stats = []
    for num_host_blocks in (0, 200):
        llm = LLM(
            **tight(checkpoint, num_host_blocks),
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
        )
        check_all(llm, expected)
        stats.append(llm.stats())
    again, swapped = stats
    assert (again["swapped_out_blocks"], again["host_blocks_total"]) == (0, 0)
    assert again["preemptions"] > 0
    assert again["recomputed_tokens"] > 0
    assert swapped["preemptions"] > 0
    assert swapped["swapped_in_tokens"] > 0
    assert swapped["recomputed_tokens"] < again["recomputed_tokens"]
    assert (swapped["num_swapped"], swapped["host_blocks_used"]) == (0, 0)


def test_with_hardly_any_room_everything_still_ends(checkpoint: Checkpoint) -> None:
    llm = LLM(**tight(checkpoint, 1))
    params = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=30, ignore_eos=True)
    outputs = llm.generate(prompts(6, checkpoint.vocab_size), params, use_tqdm=False)
    assert all(len(answer.token_ids) == 30 for output in outputs for answer in output.outputs)
    assert llm.stats()["preemptions"] > 0
    assert llm.stats()["host_blocks_total"] == 1
    assert_at_rest(llm)


def test_costs_are_measured(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()
    with caplog.at_level(logging.INFO, logger="pagedkv"):
        llm = LLM(**tight(checkpoint, 10))
    assert "20.00 KiB of host memory hold 10 blocks of preempted sequences" in caplog.messages
    assert any("computing a token takes" in message for message in caplog.messages)
    assert_at_rest(llm)
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    assert output.finished


@pytest.mark.parametrize(
    ("swap_space", "message"),
    [
        (40, r"^swap_space is 40\.00 GiB, but 32\.00 GiB of host memory are free; allowed: at most 31\.99$"),
        (1e-8, r"^swap_space is 10 bytes, allowed: 0, or at least 8\.00 KiB, which is one block$"),
        (1e-12, r"^swap_space is 1 bytes, allowed: 0, or at least 8\.00 KiB, which is one block$"),
    ],
)
def test_space_that_does_not_fit_is_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, swap_space: float, message: str
) -> None:
    monkeypatch.setattr(loading, "free_memory", lambda: 32 * 2**30)
    with pytest.raises(ValueError, match=message):
        LLM(**checkpoint.options, swap_space=swap_space)


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_space_that_cannot_be_had_is_one_line(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_arguments: Any, **_options: Any) -> None:
        raise error("no pages\nException raised from somewhere")

    monkeypatch.setattr(loading, "HostCache", fail)
    with pytest.raises(ValueError, match=r"^20\.00 KiB of host memory cannot be had .*: no pages$"):
        LLM(**tight(checkpoint, 10))


async def test_a_server_shows_what_was_moved(checkpoint: Checkpoint) -> None:
    async with AsyncLLM(**tight(checkpoint, 200)) as llm, serving(llm, keeps_engine=True) as client:
        fields = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
        answers = [
            client.post("/v1/completions", json={"prompt": [idx + 4] * 30, **fields}) for idx in range(6)
        ]
        for response in await asyncio.gather(*answers):
            assert response.status == 200
        await at_rest(llm)
        text = await (await client.get("/metrics")).text()
    samples = {
        sample.name.removeprefix("pagedkv:"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["kv_blocks_swapped_out_total"] >= samples["kv_blocks_swapped_in_total"] > 0
    assert samples["swapped_tokens_total"] > 0
    assert samples["kv_host_blocks"] == 200
    assert (samples["kv_host_blocks_used"], samples["num_requests_swapped"]) == (0, 0)


def test_a_snapshot_and_the_arena_show_what_is_where() -> None:
    core = _core.Core(
        num_blocks=16,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=60,
        num_host_blocks=16,
    )
    core.set_swap_costs(*MOVING_IS_CHEAPER)
    for token in (5, 6):
        core.edge.submit(np.full(8, token, dtype=np.int32), max_tokens=40, ignore_eos=True)
    arena = np.zeros(core.arena_len, dtype=np.int32)
    while (header := core.schedule(arena)) is not None and header.num_swaps_out == 0:
        core.commit(header.step_id, np.full(header.num_rows, 9, dtype=np.int32))
    assert header is not None
    assert header.num_swaps_in == 0
    waiting = core.snapshot()["sequences"][1]
    assert (waiting["status"], waiting["blocks"]) == ("waiting", [])
    swaps = arena_section(arena, "swaps")
    assert swaps[:, 0].tolist() == [0] * header.num_swaps_out
    assert swaps[:, 2].tolist() == waiting["host_blocks"]


CACHES = [tuple(torch.randn(9, 2, 8, 80) for _ in range(2)) for _ in range(3)]


@pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
@pytest.mark.parametrize("to_host", [True, False])
def test_blocks_are_moved_both_ways(ops: Any, to_host: bool) -> None:
    device = [tuple(cache.clone() for cache in pair) for pair in CACHES]
    host = [tuple(torch.randn(5, 2, 8, 80) for _ in range(2)) for _ in range(3)]
    before = [tuple(cache.clone() for cache in pair) for pair in (host if to_host else device)]
    pairs = torch.tensor([[1, 4], [8, 0], [3, 3]], dtype=torch.int32)
    ops.swap_blocks(device, host, pairs, to_host=to_host)
    ops.swap_blocks(device, host, pairs[:0], to_host=to_host)
    written = {4, 0, 3} if to_host else {1, 8, 3}
    for layer, host_layer, old_layer in zip(device, host, before, strict=True):
        for cache, host_cache, old in zip(layer, host_layer, old_layer, strict=True):
            for block, host_block in pairs.tolist():
                assert torch.equal(cache[block], host_cache[host_block])
            target = host_cache if to_host else cache
            untouched = [block for block in range(len(target)) if block not in written]
            assert torch.equal(target[untouched], old[untouched])


def test_moves_that_do_not_fit_are_refused() -> None:
    device, host = [(torch.zeros(4, 2, 4, 8),) * 2], [(torch.zeros(3, 2, 4, 8),) * 2]
    with pytest.raises(ValueError, match=r"copies\[0\] is \[3, 3\], allowed: blocks 0 to 2"):
        cpu.swap_blocks(device, host, torch.tensor([[3, 3]]), to_host=True)
    with pytest.raises(ValueError, match=r"copies\[1\] is \[1, 2\], allowed: destinations that no"):
        cpu.swap_blocks(device, host, torch.tensor([[2, 0], [2, 1]]), to_host=False)
    with pytest.raises(ValueError, match="number of destinations is 2, allowed: 4"):
        cpu.swap_blocks(device * 2, host, torch.tensor([[1, 1]]), to_host=True)
    with pytest.raises(ValueError, match="allowed: blocks like"):
        cpu.swap_blocks(device, [(torch.zeros(3, 2, 4, 4),) * 2], torch.tensor([[1, 1]]), to_host=True)


class Journal:
    """Stands for the operations and the streams of a GPU, and notes what is asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self.current = Stream(self, "compute")
        monkeypatch.setattr(torch.cuda, "Stream", lambda _device: Stream(self, "swap"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    @contextmanager
    def on(self, stream: "Stream") -> Any:
        before, self.current = self.current, stream
        yield
        self.current = before

    def swap_blocks(self, _caches: Any, _host: Any, pairs: Tensor, *, to_host: bool) -> None:
        self.lines.append(f"{self.current.name}: {pairs.tolist()} {'out' if to_host else 'in'}")


class Stream:
    def __init__(self, journal: Journal, name: str) -> None:
        self.journal, self.name, self.num_events = journal, name, 0

    def wait_stream(self, other: "Stream") -> None:
        self.journal.lines.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.journal.lines.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.num_events += 1
        self.journal.lines.append(f"{self.name}: event {self.num_events}")
        return f"event {self.num_events}"


def test_on_a_gpu_moves_run_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    journal: Any = Journal(monkeypatch)
    kv_cache: Any = KVCache(1, 3, 1, 4, 8, torch.float32, "cpu")
    host_cache = HostCache(kv_cache, 2)
    kv_cache.layers = [(SimpleNamespace(device=torch.device("cuda")),) * 2]
    swap = HostSwap(kv_cache, host_cache)
    swap.start(journal, torch.tensor([[1, 0]]), torch.tensor([[2, 1]]))
    journal.lines.append("copies")
    swap.finish(journal)
    assert journal.lines == [
        "swap waits for compute",
        "swap: [[1, 0]] out",
        "swap: event 1",
        "swap: [[2, 1]] in",
        "swap: event 2",
        "compute waits for event 1",
        "copies",
        "compute waits for event 2",
    ]
