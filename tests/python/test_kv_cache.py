"""The memory of keys and values."""

import asyncio
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
    """Beside a cache of the same size that was not made ready, whose pages are mapped by writing them."""
    caches = [KVCache(2, 1023, 3, 16, 64, torch.bfloat16, "cpu") for _ in range(2)]
    tensors = [[tensor for pair in cache.layers for tensor in pair] for cache in caches]
    pieces = 1
    while caches[0].make_ready(0):
        pieces += 1
    assert pieces == 4 * 4 + 1, "four pieces of 2 MiB in each of four tensors, then nothing"
    assert all(not tensor.any() for tensor in tensors[0])
    untouched = faults_while_writing(tensors[1])
    assert untouched > 0, "the machine maps pages when they are written"
    assert faults_while_writing(tensors[0]) < untouched / 10


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
