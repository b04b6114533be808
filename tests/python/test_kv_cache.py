"""The memory of keys and values."""

import asyncio
import mmap
import resource
import time

import pytest
import torch

from pagedkv.kv_cache import READY_BYTES, FirstTouch, KVCache
from tiny_llm import Checkpoint, async_engine


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
