"""Attention: the compiled kernels, the planner's work lists and the packed parameters against float64."""

import pytest
import torch

from host_device import HostDevice
from paged_steps import exact_attention, make_step, relative_error
from pagedkv.ops.cuda import CudaOps

# Weights are rounded to 16 bits before they meet the values, and so are results.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
BF16, HALF = torch.bfloat16, torch.float16

DECODES = [(1, 1), (1, 37), (1, 130)]
MIXED = [(1, 64), (1, 33), (33, 33), (20, 90)]
LONG = [(1, 700), (1, 5), (3, 900)]

# Together they have every head size and block size, ratios of heads from 1 to 12, both element types and
# both shapes of a block, decodes, prompts, chunks, several tokens a sequence, and contexts in parts.
CASES = [
    (DECODES, {"head_dim": 64, "dtype": BF16, "block_size": 16}),
    (DECODES, {"head_dim": 80, "dtype": HALF, "block_size": 8, "heads": (2, 2)}),
    (MIXED, {"head_dim": 128, "dtype": BF16, "block_size": 16}),
    (MIXED, {"head_dim": 64, "dtype": HALF, "block_size": 32, "heads": (7, 1), "slots_first": True}),
    (MIXED, {"head_dim": 96, "dtype": BF16, "block_size": 64}),
    (LONG, {"head_dim": 128, "dtype": HALF, "block_size": 256, "slots_first": True}),
    (LONG, {"head_dim": 256, "dtype": BF16, "block_size": 128, "heads": (4, 2)}),
    ([(70, 70)], {"head_dim": 256, "dtype": HALF, "block_size": 16, "heads": (2, 1)}),
    ([(40, 300)], {"head_dim": 80, "dtype": BF16, "block_size": 16, "heads": (12, 1)}),
]


def run(device: HostDevice, step: object, **changes: object) -> float:
    ops = CudaOps(device, key_scale=step.key_scale, value_scale=step.value_scale)
    given = ops.paged_attention(step.q, step.key_cache, step.value_cache, step.batch, step.scale)
    return relative_error(given, exact_attention(step))


@pytest.mark.parametrize(("lengths", "shape"), CASES)
@pytest.mark.parametrize("seed", [0, 7])
def test_equals_float64(lengths, shape, seed):
    device = HostDevice(seed=seed)
    assert run(device, make_step(lengths, **shape)) < TOLERANCE[shape["dtype"]]
    assert device.counters("attention")["bank_conflicts"] == 0
