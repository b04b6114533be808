"""What it costs to move a block to host memory, and to compute a token instead: measured once, at start.

The core weighs the two for every sequence that it preempts. A guess would be wrong somewhere: on a large GPU
moving should be several times cheaper, for a tiny model it need not be.
"""

import logging
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from pagedkv import _core
from pagedkv.runner import ModelRunner
from pagedkv.swap import HostSwap

logger = logging.getLogger("pagedkv")

# Tokens of the prompt that is computed: enough that reading the weights is shared, few enough that a large
# model on few cores needs seconds, not minutes.
CPU_TOKENS: Final = 64
GPU_TOKENS: Final = 1024
NUM_BLOCKS: Final = 16
REPEATS: Final = 3
_MOST_NS: Final = 2**32 - 1


def measure(runner: ModelRunner, swap: HostSwap, *, max_num_tokens: int) -> tuple[int, int]:
    """Nanoseconds to compute a token and to move a block one way.

    The least of three runs counts, since everything that disturbs a run makes it longer. A prompt is computed
    as requests will be, through a core of its own, and some blocks go to the host and back. Both leave
    garbage in the cache, which holds nothing yet.

    Args:
        runner: ready to compute; its cache is not in use.
        swap: what moves blocks between that cache and host memory.
        max_num_tokens: the longest prompt, and the most tokens of a step.
    """
    on_gpu = runner.stage.torch_device.type == "cuda"
    compute_ns = _time_prompt(runner, min(GPU_TOKENS if on_gpu else CPU_TOKENS, max_num_tokens))
    num_blocks = min(NUM_BLOCKS, swap.num_blocks, runner.kv_cache.num_blocks)
    ids = torch.arange(num_blocks, dtype=torch.int32)
    # Block 0 of the cache is the null block.
    pairs = torch.stack((ids + 1, ids), dim=1).to(runner.stage.torch_device)

    def there_and_back() -> None:
        with runner.stage.active():
            for to_host in (True, False):
                swap.move(runner.ops, pairs, to_host=to_host)

    move_ns = _least_ns(there_and_back) // (2 * num_blocks)
    logger.info(
        "computing a token takes %.1f us, moving a block to host memory %.1f us",
        compute_ns / 1e3,
        move_ns / 1e3,
    )
    return min(max(1, compute_ns), _MOST_NS), min(max(1, move_ns), _MOST_NS)


def _time_prompt(runner: ModelRunner, num_tokens: int) -> int:
    """Nanoseconds a token of a prompt, its one sampled token included."""
    kv_cache = runner.kv_cache
    num_tokens = min(num_tokens, kv_cache.num_blocks * kv_cache.block_size - 1)
    core = _core.Core(
        num_blocks=kv_cache.num_blocks,
        block_size=kv_cache.block_size,
        max_num_seqs=1,
        max_num_batched_tokens=num_tokens,
        max_model_len=num_tokens + 1,
        enable_prefix_caching=False,
        max_queued_requests=1,
    )
    core.edge.submit(np.zeros(num_tokens, dtype=np.int32), max_tokens=1)
    arena = runner.new_arena(core.arena_len)
    header = core.schedule(arena)
    assert header is not None, "a core that just got a request has a step"
    # The same step computed again writes the same.
    return _least_ns(lambda: runner.launch(header, arena).result()) // num_tokens


def _least_ns(work: Callable[[], object]) -> int:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter_ns()
        work()
        times.append(time.perf_counter_ns() - started)
    return min(times)
