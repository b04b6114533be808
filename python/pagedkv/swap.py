"""Moves of blocks between the cache and host memory, in the order that a step wants them.

The core decides what moves (`rust/sched/swap.rs`); the runner calls this around the step's copies. To the
host comes first, since the blocks given up may be written by whatever follows; what comes back must be there
before the forward pass. On a GPU the moves run on a stream of their own, and the stream that computes waits
for them by events.
"""

import torch
from torch import Tensor

from pagedkv.kv_cache import HostCache, KVCache
from pagedkv.ops import Ops


class HostSwap:
    """The cache, its room in host memory, and the stream on which blocks move between them.

    Attributes:
        num_blocks: blocks of host memory.
    """

    def __init__(self, kv_cache: KVCache, host_cache: HostCache) -> None:
        self.num_blocks = host_cache.num_blocks
        self._layers = kv_cache.layers
        self._host_layers = host_cache.layers
        self._stream: torch.cuda.Stream | None = None
        device = kv_cache.layers[0][0].device
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._incoming: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def start(self, ops: Ops, outgoing: Tensor, incoming: Tensor) -> None:
        """Moves blocks to the host. On a GPU those that come back start as well.

        Both are pairs of a block of the cache and one of host memory, i32 [W, 2] where `ops` computes.
        """
        if self._stream is None:
            self._move(ops, outgoing, to_host=True)
            self._incoming = incoming
            return
        compute = torch.cuda.current_stream()
        # Until then earlier steps may write what leaves, and read what is overwritten by what comes back.
        self._stream.wait_stream(compute)
        with torch.cuda.stream(self._stream):
            self._move(ops, outgoing, to_host=True)
            left = self._stream.record_event()
            # This may run beside the step's copies: none of them reads or writes these blocks.
            self._move(ops, incoming, to_host=False)
            self._arrived = self._stream.record_event()
        compute.wait_event(left)

    def finish(self, ops: Ops) -> None:
        """Has everything that came back in place for what follows; called after the step's copies."""
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
        elif self._incoming is not None:
            self._move(ops, self._incoming, to_host=False)
        self._arrived = self._incoming = None

    def move(self, ops: Ops, pairs: Tensor, *, to_host: bool) -> None:
        """Moves blocks one way, as the operation does, and waits for that: for measurements."""
        self._move(ops, pairs, to_host=to_host)
        if self._stream is not None:
            torch.cuda.synchronize()

    def _move(self, ops: Ops, pairs: Tensor, *, to_host: bool) -> None:
        if len(pairs):
            ops.swap_blocks(self._layers, self._host_layers, pairs, to_host=to_host)
