"""The memory of keys and values."""

import asyncio
import gc
import mmap
import resource
import subprocess
import sys
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from pagedkv import LLM
from pagedkv.kv_cache import READY_BYTES, FirstTouch, KVCache
from tiny_llm import GREEDY, Checkpoint, async_engine


@pytest.mark.parametrize("num_blocks", [3, 4000])
def test_a_cache_of_the_cpu_begins_with_a_cache_line_and_is_zero(num_blocks: int) -> None:
    cache = KVCache(2, num_blocks, 3, 16, 64, torch.bfloat16, "cpu")
    for pair in cache.layers:
        for tensor in pair:
            assert tensor.shape == (num_blocks + 1, 3, 16, 64)
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 64 == 0
            assert not tensor.any()


def faults_while_writing(tensors: list[torch.Tensor]) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for tensor in tensors:
        tensor.fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_pages_that_are_made_ready_are_not_waited_for() -> None:
    memory = [mmap.mmap(-1, 5 << 20) for _ in range(4)]
    tensors = [torch.frombuffer(each, dtype=torch.bfloat16).view(1280, 16, 128) for each in memory]
    touch = FirstTouch(tensors[:2])
    num_pieces = 0
    while touch.advance(1280):
        num_pieces += 1
    assert num_pieces == 6, "three pieces of 2 MiB, the last one cut short, in each tensor"
    untouched = faults_while_writing(tensors[2:])
    assert untouched > 0, "pages are mapped when they are written"
    assert faults_while_writing(tensors[:2]) < untouched / 2


def test_only_so_much_is_made_ready() -> None:
    cache = KVCache(1, 200_000, 3, 16, 64, torch.bfloat16, "cpu")
    pieces = 0
    while cache.make_ready(num_used=0):
        pieces += 1
    assert READY_BYTES <= pieces * (2 << 20) <= READY_BYTES + (8 << 20)
    assert cache.make_ready(num_used=1000), "more is in use, so more is wanted"


def test_what_pages_hold_stays() -> None:
    tensors = [torch.arange(3 << 18, dtype=torch.int32).view(48, -1) for _ in range(2)]
    touch = FirstTouch(tensors)
    while touch.advance(48):
        pass
    assert all(torch.equal(tensor.view(-1), torch.arange(3 << 18, dtype=torch.int32)) for tensor in tensors)


async def test_an_idle_engine_makes_its_cache_ready(checkpoint: Checkpoint) -> None:
    async with async_engine(checkpoint) as llm:
        cache = llm._thread._engine.runner.kv_cache
        deadline = time.monotonic() + 20
        while cache._first_touch._num_blocks <= cache.num_blocks:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


def test_between_its_calls_an_llm_makes_its_cache_ready(checkpoint: Checkpoint) -> None:
    llm = LLM(**checkpoint.options | {"num_blocks": 100_000})
    touch = llm._engine.runner.kv_cache._first_touch
    wait_for(lambda: touch._num_blocks > 0)
    for _ in range(3):
        llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
        # As long as a call goes on nothing is touched beside it, and then it goes on.
        llm._idle.pause()
        done = touch._num_blocks, touch._num_tensors
        time.sleep(0.01)
        assert (touch._num_blocks, touch._num_tensors) == done
        llm._idle.resume()
        wait_for(lambda done=done: (touch._num_blocks, touch._num_tensors) > done)


def test_an_idle_thread_keeps_no_engine(checkpoint: Checkpoint) -> None:
    llm = LLM(**checkpoint.options | {"num_blocks": 100_000})
    engine, thread = weakref.ref(llm._engine), llm._idle._thread
    del llm
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()
    assert engine() is None


def test_a_process_may_end_while_the_cache_is_made_ready(checkpoint: Checkpoint) -> None:
    options = checkpoint.options | {"num_blocks": 100_000}
    script = f"from pagedkv import LLM\nllm = LLM(**{options!r})\nassert llm._idle._thread.is_alive()"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
