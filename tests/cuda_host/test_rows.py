"""Kernels that work row by row, and those that write the cache, against float64 and against torch."""

import pytest
import torch

from host_device import HostDevice
from paged_steps import FP8, relative_error, swizzle
from pagedkv.ops import reference
from pagedkv.ops.cuda import CudaOps

DTYPES = [torch.bfloat16, torch.float16]
# Half a unit in the last place, relative to the number.
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, FP8: 2.0**-4}


@pytest.fixture(scope="module", params=["sm_80", "sm_90"])
def ops(request):
    return CudaOps(HostDevice(request.param, seed=3), key_scale=0.5, value_scale=0.25)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 576, 4096])
def test_rms_norm(ops, dtype, size):
    wide = torch.randn(5, size + 8).to(dtype)
    x, weight = wide[:, :size], torch.randn(size).to(dtype)
    expected = reference.rms_norm(x, weight, 1e-5)
    # The sums of squares have another order, so a few elements are rounded to the other side.
    assert relative_error(ops.rms_norm(x, weight, 1e-5), expected.double()) < ROUNDING[dtype] / 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_rounds_the_sum_first(ops, dtype):
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((3, 192), (3, 192), (192,)))
    total = x + residual
    out = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert relative_error(out, reference.rms_norm(total, weight, 1e-6).double()) < ROUNDING[dtype] / 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_adds_in_place_to_rows_with_gaps(ops, dtype):
    x, residual = (torch.randn(3, 200).to(dtype) for _ in range(2))
    weight, before = torch.randn(192).to(dtype), residual.clone()
    ops.add_rms_norm(x[:, :192], residual[:, :192], weight, 1e-6)
    assert torch.equal(residual[:, :192], (x + before)[:, :192])
    assert torch.equal(residual[:, 192:], before[:, 192:])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            torch.zeros(2, 192),
            r"residual is \[2, 192\] of torch.float32, allowed: \[3, 192\] of torch.float16",
        ),
        (torch.zeros(3, 196).half()[:, :192], "residual has rows of 192 elements 196 apart"),
    ],
)
def test_a_residual_that_does_not_fit_is_refused(ops, other, message):
    with pytest.raises(ValueError, match=message):
        ops.add_rms_norm(torch.zeros(3, 192).half(), other, torch.zeros(192).half(), 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_weights_multiply_as_the_references_do(ops, dtype):
    x, first, second = (torch.randn(shape).to(dtype) for shape in ((5, 64), (96, 64), (96, 64)))
    bias = torch.randn(96).to(dtype)
    for gated, biases in ((False, [bias, None]), (True, [None, None])):
        packed = ops.pack_linear([first, second], biases, gated=gated)
        expected = reference.linear(x, reference.pack_linear([first, second], biases, gated=gated))
        assert relative_error(ops.linear(x, packed), expected.double()) < ROUNDING[dtype]
    assert ops.linear(x, packed, torch.float32).dtype == torch.float32
    ids = torch.tensor([7, 0, 95], dtype=torch.int32)
    assert torch.equal(ops.embedding(ids, ops.pack_linear([first], [None])), first[ids.long()])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_of_a_packed_matrix(ops, dtype):
    gate, up = (3 * torch.randn(4, 2 * 1032)).to(dtype).split(1032, dim=1)
    expected = torch.nn.functional.silu(gate.float()).to(dtype).double() * up.double()
    assert relative_error(ops.silu_mul(gate, up), expected) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_rope_cache(ops, dtype, fp8, head_dim):
    num_tokens, num_heads, num_kv_heads, block_size = 5, 6, 2, 16
    packed = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim).to(dtype)
    sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
    q, k, v = (part.view(num_tokens, -1, head_dim) for part in packed.split(sizes, dim=1))
    angles = torch.outer(torch.arange(50.0), 10000 ** (-torch.arange(0, head_dim, 2) / head_dim)).repeat(1, 2)
    positions = torch.randint(0, 50, (num_tokens,)).int()
    slots = torch.tensor([17, 3, -1, 40, 63], dtype=torch.int32)
    stored, scales = (FP8, (0.5, 0.25)) if fp8 else (dtype, (1.0, 1.0))
    caches = [torch.full((5, num_kv_heads, block_size, head_dim), float("nan")).to(stored) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    one_scale = ops if fp8 else CudaOps(ops.device)

    rotated = one_scale.rope_cache(q, k, v, angles.cos(), angles.sin(), positions, *caches, slots)

    cos, sin = angles.double().cos()[positions.long()], angles.double().sin()[positions.long()]
    assert relative_error(rotated, reference.rotate(q.double(), cos, sin)) < ROUNDING[dtype]
    written = slots[slots >= 0].long()
    expected = (reference.rotate(k.double(), cos, sin), v.double())
    for cache, old, scale, rows in zip(caches, before, scales, expected, strict=True):
        given = cache[written // block_size, :, written % block_size].double() * scale
        assert relative_error(given, rows[slots >= 0]) < ROUNDING[stored]
        # Everything else is as it was.
        cache[written // block_size, :, written % block_size] = old[0, :, 0]
        assert torch.equal(cache.view(torch.uint8), old.view(torch.uint8))


def test_fp8_is_torchs_in_hardware_and_in_software(ops):
    """Every size of e4m3, the middles between them, and what lies beyond, are rounded as torch does it."""
    sizes = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    edges = torch.cat((sizes, (sizes[1:] + sizes[:-1]) / 2, torch.tensor([447.0, 448.0, 500.0, 1e30])))
    values = torch.cat((edges, -edges, edges * (1 + 2.0**-10), edges * (1 - 2.0**-10)))
    values = torch.nn.functional.pad(values, (0, -len(values) % 64)).view(-1, 1, 64).half()
    saturated = values.float().clamp(-448, 448).to(FP8)
    num_tokens = len(values)
    caches = [torch.zeros((num_tokens, 1, 8, 64), dtype=FP8) for _ in range(2)]
    plain = CudaOps(ops.device)
    zeros = torch.zeros(1, 64)
    indices = torch.arange(num_tokens, dtype=torch.int32)
    plain.rope_cache(values, values, values, zeros + 1, zeros, indices * 0, *caches, indices * 8)
    assert torch.equal(caches[1][:, 0, 0].view(torch.uint8), saturated[:, 0].view(torch.uint8))


def test_copy_blocks():
    ops = CudaOps(HostDevice())
    layers = [tuple(torch.randn(9, 2, 8, 80).bfloat16() for _ in range(2)) for _ in range(3)]
    expected = [tuple(cache.clone() for cache in pair) for pair in layers]
    copies = torch.tensor([[1, 4], [1, 7], [8, 2]], dtype=torch.int32)
    ops.copy_blocks(layers, copies)
    reference.copy_blocks(expected, copies)
    for given, wanted in zip(layers, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(given, wanted, strict=True))


def test_a_swizzled_cache_is_the_plain_one_in_another_order():
    device = HostDevice()
    k, v = torch.randn(8, 2, 128).half(), torch.randn(8, 2, 128).half()
    caches = [[torch.zeros(3, 2, 16, 128).half() for _ in range(2)] for _ in range(2)]
    slots = torch.tensor([16, 17, 21, 30, 31, 40, 3, 4], dtype=torch.int32)
    angles, positions = torch.rand(9, 64).repeat(1, 2), torch.arange(8, dtype=torch.int32)
    for swizzled, pair in zip((False, True), caches, strict=True):
        ops = CudaOps(device, swizzled=swizzled)
        ops.rope_cache(k, k, v, angles.cos(), angles.sin(), positions, *pair, slots)
    for plain, other in zip(*caches, strict=True):
        assert torch.equal(swizzle(plain), other)
