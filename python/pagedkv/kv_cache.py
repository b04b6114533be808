"""The tensors that hold keys and values, one pair a layer.

The Rust core decides which block holds what; this is only the memory. The runner creates one `KVCache` and
hands it to the model with every step.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

# Memory beyond the blocks in use that is made ready while the engine is idle: about 16,000 tokens of a model
# whose tokens take 24 KiB.
READY_BYTES: Final = 384 << 20
_LARGE_PAGE_BYTES: Final = 2 << 20
# What is made ready at a time: a request that comes meanwhile waits no longer than that takes.
_PIECE_BYTES: Final = _LARGE_PAGE_BYTES
_PAGE_BYTES: Final = 4 << 10
_CACHE_LINE_BYTES: Final = 64


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
        on_cpu = torch.device(device).type == "cpu"
        self._first_touch = FirstTouch([cache for pair in self.layers for cache in pair] if on_cpu else [])

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, over all layers."""
        return sum(cache[0].nbytes for pair in self.layers for cache in pair)

    def make_ready(self, num_used: int) -> bool:
        """Maps a piece of the memory that comes next, if blocks 1 to `num_used` are in use or were.

        To be called while nothing is computed. Returns False if READY_BYTES beyond them are mapped, or all.
        """
        ahead = READY_BYTES // max(1, self.block_bytes)
        return self._first_touch.advance(1 + min(self.num_blocks, num_used + ahead))


class FirstTouch:
    """Writes to pages of tensors for the first time, a piece at a time, so that the kernel maps them.

    It zeroes a page when that is first written, 0.3 to 2.5 ms for 2 MiB, and a step whose blocks lie on fresh
    pages of every layer waits for all of them. What the pages hold does not change.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Takes dense tensors on the CPU, of one shape and type, whose first dimension are blocks."""
        self._memory = [tensor.view(torch.uint8).view(-1).numpy() for tensor in tensors]
        self._block_bytes = tensors[0][0].nbytes if tensors else 0
        # Blocks that are mapped in all tensors, and tensors in which the next ones are.
        self._num_blocks = 0
        self._num_tensors = 0

    def advance(self, num_blocks: int) -> bool:
        """Maps a piece of one tensor; False if the first `num_blocks` blocks are mapped in all of them."""
        if not self._memory or self._num_blocks >= num_blocks:
            return False
        piece = max(1, _PIECE_BYTES // self._block_bytes)
        start, end = (count * self._block_bytes for count in (self._num_blocks, self._num_blocks + piece))
        self._memory[self._num_tensors][start:end:_PAGE_BYTES] |= 0
        self._num_tensors += 1
        if self._num_tensors == len(self._memory):
            self._num_tensors = 0
            self._num_blocks += piece
        return True


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
    """Zeros in pages that the kernel maps when they are first touched: an idle pool costs little memory.

    `torch.zeros` writes them, which maps them all at once; numpy asks the allocator for memory that is zero.
    What that returns for so much begins 16 bytes behind a page, and numpy asks for large pages from the next
    one on, so the first 2 MiB would lie on small ones: the tensor begins where a large page does. A small
    tensor begins with a cache line, because rows that straddle two make attention from a near cache a seventh
    slower.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    alignment = _LARGE_PAGE_BYTES if num_bytes >= _LARGE_PAGE_BYTES else _CACHE_LINE_BYTES
    memory = np.zeros(num_bytes + alignment, dtype=np.uint8)
    skipped = -memory.ctypes.data % alignment
    return torch.from_numpy(memory[skipped : skipped + num_bytes]).view(dtype).view(shape).to(device)
