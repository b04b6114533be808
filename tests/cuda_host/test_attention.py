"""Attention: the compiled kernels, the planner's work lists and the packed parameters against float64."""

import numpy as np
import pytest
import torch

from host_device import HostDevice
from paged_steps import exact_attention, make_step, relative_error, swizzle
from pagedkv.ops.cuda import CudaOps
from pagedkv.ops.cuda_attention import WORK_LIST, plan_batch
from pagedkv.ops.cuda_work_list import WorkListLayout

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


# fp8: queries and weights are rounded to half, results to the element type.
FP8_CASES = [
    ("sm_80", DECODES, {"head_dim": 64, "dtype": BF16, "block_size": 16}),
    ("sm_90", LONG, {"head_dim": 128, "dtype": HALF, "block_size": 32}),
    ("sm_90", MIXED, {"head_dim": 80, "dtype": BF16, "block_size": 8, "heads": (7, 1)}),
    ("sm_80", MIXED, {"head_dim": 96, "dtype": HALF, "block_size": 16}),
    ("sm_90", [(1, 300), (30, 70)], {"head_dim": 256, "dtype": BF16, "block_size": 64}),
]


def run(device, step):
    """The error of the kernels' attention in one step."""
    ops = CudaOps(device, key_scale=step.key_scale, value_scale=step.value_scale)
    given = ops.paged_attention(step.q, step.key_cache, step.value_cache, step.batch, step.scale)
    return relative_error(given, exact_attention(step))


@pytest.mark.parametrize(("lengths", "shape"), CASES)
@pytest.mark.parametrize("seed", [0, 7])
def test_equals_float64(lengths, shape, seed):
    device = HostDevice(seed=seed)
    assert run(device, make_step(lengths, **shape)) < TOLERANCE[shape["dtype"]]
    assert device.counters("attention")["bank_conflicts"] == 0


@pytest.mark.parametrize(("arch", "lengths", "shape"), FP8_CASES)
def test_fp8_equals_float64(arch, lengths, shape):
    device = HostDevice(arch, seed=5)
    assert run(device, make_step(lengths, fp8=True, **shape)) < TOLERANCE[shape["dtype"]]
    assert device.counters("attention_fp8")["bank_conflicts"] == 0


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        (LONG, {"head_dim": 128, "dtype": BF16, "block_size": 16}),
        (DECODES, {"head_dim": 64, "dtype": HALF, "block_size": 8, "heads": (7, 1)}),
        ([(1, 300), (20, 90), (1, 64)], {"head_dim": 256, "dtype": BF16, "block_size": 256}),
        ([(1, 272 + own) for own in (3, 40, 17, 90)], {"head_dim": 64, "num_shared": 272, "dtype": BF16}),
    ],
)
@pytest.mark.parametrize("seed", [0, 3, 8])
def test_bulk_copies_equal_float64(lengths, shape, seed):
    step = make_step(lengths, **shape)
    device = HostDevice(seed=seed)
    ops = CudaOps(device, swizzled=True)
    caches = (swizzle(step.key_cache), swizzle(step.value_cache))
    given = ops.paged_attention(step.q, *caches, step.batch, step.scale)
    assert relative_error(given, exact_attention(step)) < TOLERANCE[shape["dtype"]]
    assert device.counters("attention_bulk")["bank_conflicts"] == 0


@pytest.mark.parametrize("num_shared", [256, 272, 512])
def test_a_shared_prefix_is_read_once(num_shared):
    step = make_step([(1, num_shared + own) for own in (3, 40, 17, 90, 1)], num_shared=num_shared)
    device = HostDevice()
    assert run(device, step) < TOLERANCE[BF16]
    separate = sum(len(keys) for keys in step.keys)
    keys_read = num_shared + separate - num_shared * len(step.keys)
    row_bytes = step.q[0, 0].numel() * 2
    # A query is read for its own keys, and for each part of the shared ones.
    query_rows = step.q.shape[0] * step.q.shape[1] * (1 + -(-num_shared // 256))
    # Keys and values of two heads.
    assert device.counters("attention")["async_bytes"] == (2 * 2 * keys_read + query_rows) * row_bytes


def test_keys_are_read_once():
    """Counters against the floor: what has to be read and multiplied, whatever the ratio of heads."""
    step = make_step([(1, 640), (1, 640)], heads=(12, 2), head_dim=128)
    device = HostDevice(capacity=4)
    assert run(device, step) < TOLERANCE[BF16]
    counters = device.counters("attention")
    floor = 2 * 2 * 640 * 2 * 128 * 2  # sequences, keys and values, tokens, heads, dimensions, bytes
    assert counters["async_bytes"] - step.q.numel() * 2 == floor
    # 16 packed rows: a product of 16 x 8 x 16 for each 8 keys and 16 dimensions, and another for the values.
    assert counters["mma"] == 2 * 2 * (640 // 8) * (128 // 16) * 2
    # Positions, tables and items, beside the queries, are all that is read otherwise.
    assert counters["load_bytes"] < floor / 4


def test_padding_of_the_work_list_does_nothing():
    """A captured graph has a fixed grid; items without rows fill it up."""
    step = make_step([(1, 20)])
    ops = CudaOps(HostDevice())
    expected = ops.paged_attention(step.q, step.key_cache, step.value_cache, step.batch, step.scale)
    plan = plan_batch(step.batch, ops.attention.options((8, 64), step.key_cache))
    layout = WorkListLayout(3, len(plan.items) + 4, 20, 40)
    words = np.full(layout.num_words, -5, dtype=np.int32)
    layout.pack(plan, words)
    placed = torch.from_numpy(words)
    step.batch.prepared[WORK_LIST] = layout.view(placed, torch.from_numpy(plan.part_rows))
    given = ops.paged_attention(step.q, step.key_cache, step.value_cache, step.batch, step.scale)
    assert torch.equal(given, expected)


def test_a_model_that_the_kernels_cannot_compute_is_refused():
    ops = CudaOps(HostDevice())
    with pytest.raises(ValueError, match=r"dtype is torch.float32, allowed on a GPU"):
        ops.prepare(torch.float32, 64)
    with pytest.raises(ValueError, match="head_dim of the model is 48, allowed on a GPU"):
        ops.prepare(BF16, 48)


def test_what_the_kernels_cannot_do_is_refused():
    ops = CudaOps(HostDevice())
    for changes, message in (
        ({"head_dim": 32}, "head_dim is 32, allowed: 64, 80, 96, 128, 256"),
        ({"block_size": 4}, "block_size is 4, allowed: 8, 16, 32, 64, 128, 256"),
        ({"dtype": torch.float32}, "dtype of q is torch.float32, allowed: torch.bfloat16, torch.float16"),
    ):
        step = make_step([(1, 20)], **changes)
        with pytest.raises(ValueError, match=message):
            ops.paged_attention(step.q, step.key_cache, step.value_cache, step.batch, step.scale)
