"""The tensors that hold keys and values, one pair a layer.

The Rust core decides which block holds what; this is only the memory. The runner creates one `KVCache` and
hands it to the model with every step.
"""

import math

import numpy as np
import torch
from torch import Tensor

_CACHE_LINE_BYTES = 64


class KVCache:
    """Keys and values of all layers, in blocks.

    `layers[i]` is the pair (key_cache, value_cache) of layer i, each [num_blocks + 1, num_kv_heads,
    block_size, head_dim] and contiguous: a block of one head is one run of memory. Block 0 is the null block,
    which no sequence owns; `num_blocks` counts the others.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        poison: bool = False,
    ) -> None:
        """Allocates the cache.

        Args:
            num_layers: Layers of the model.
            num_blocks: Usable blocks; the null block comes on top.
            num_kv_heads: Key/value heads of a layer.
            block_size: Token slots in a block.
            head_dim: Elements of one head of one token.
            dtype: Element type of keys and values.
            device: Where the memory lies.
            poison: Fill with NaN, so that reading a slot that was never written shows in the answer.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks + 1, num_kv_heads, block_size, head_dim)
        zeros = _unmapped_zeros if torch.device(device).type == "cpu" else torch.zeros
        self.layers: list[tuple[Tensor, Tensor]] = [
            (zeros(shape, dtype=dtype, device=device), zeros(shape, dtype=dtype, device=device))
            for _ in range(num_layers)
        ]
        if poison:
            for pair in self.layers:
                for cache in pair:
                    cache.fill_(float("nan"))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers."""
        return sum(cache[0].nbytes for pair in self.layers for cache in pair)


class HostCache:
    """Room in ordinary memory for blocks of preempted sequences; `pagedkv.swap` moves them.

    `layers` are as those of a `KVCache`, [num_blocks, num_kv_heads, block_size, head_dim], without a null
    block. The memory is pinned if the cache lies on a GPU.
    """

    def __init__(self, kv_cache: KVCache, num_blocks: int, *, poison: bool = False) -> None:
        """Allocates room for `num_blocks` blocks of `kv_cache`. `poison`: as there."""
        self.num_blocks = num_blocks
        self.layers: list[tuple[Tensor, Tensor]] = []
        for key_cache, value_cache in kv_cache.layers:
            self.layers.append((_host_like(key_cache, num_blocks), _host_like(value_cache, num_blocks)))
        if poison:
            for pair in self.layers:
                for cache in pair:
                    cache.fill_(float("nan"))


def _host_like(cache: Tensor, num_blocks: int) -> Tensor:
    shape = (num_blocks, *cache.shape[1:])
    if cache.is_cuda:
        return torch.zeros(shape, dtype=cache.dtype, pin_memory=True)
    return _unmapped_zeros(shape, dtype=cache.dtype, device="cpu")


def _unmapped_zeros(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros in pages that the kernel maps when they are first touched: an idle pool costs no memory.

    `torch.zeros` writes them, which maps them all at once; numpy asks the allocator for memory that is zero. What
    the allocator returns for so much begins 16 bytes behind a page; the tensor begins with a cache line, because
    rows that straddle two make attention from a near cache a seventh slower.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + _CACHE_LINE_BYTES, dtype=np.uint8)
    skipped = -memory.ctypes.data % _CACHE_LINE_BYTES
    return torch.from_numpy(memory[skipped : skipped + num_bytes]).view(dtype).view(shape).to(device)
