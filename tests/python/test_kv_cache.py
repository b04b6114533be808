"""The memory of keys and values."""

import pytest
import torch

from pagedkv.kv_cache import KVCache


@pytest.mark.parametrize("num_blocks", [3, 4000])
def test_a_cache_of_the_cpu_begins_with_a_cache_line_and_is_zero(num_blocks: int) -> None:
    cache = KVCache(2, num_blocks, 3, 16, 64, torch.bfloat16, "cpu")
    for pair in cache.layers:
        for tensor in pair:
            assert tensor.shape == (num_blocks + 1, 3, 16, 64)
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 64 == 0
            assert not tensor.any()
