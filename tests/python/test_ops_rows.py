"""The row-wise CPU kernels (norms, activation) against torch: values, strides, bits that must not move."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pagedkv import _core
from pagedkv.ops import cpu, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One unit in the last place: sums are taken in another order than torch's, which may turn a rounding.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SHAPES = [(0, 64), (1, 1), (1, 576), (3, 17), (5, 100), (37, 576), (200, 1025)]


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = _core.num_threads()
    _core.set_num_threads(2)
    yield
    _core.set_num_threads(before)


def numbers(num_rows: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random rows within a wider tensor, whose other columns are NaN."""
    wide = torch.full((num_rows, width + 7), float("nan"), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    wide[:, 3 : 3 + width] = torch.randn(num_rows, width, generator=generator) * 3
    return wide[:, 3 : 3 + width]


def assert_close(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype
    assert got.is_contiguous()
    tolerance = TOLERANCE[got.dtype]
    assert torch.allclose(got.double(), expected.double(), rtol=2 * tolerance, atol=tolerance / 64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x, residual = numbers(*shape, dtype, 1), numbers(*shape, dtype, 2)
    weight = numbers(1, shape[1], dtype, 3)[0].contiguous()
    assert_close(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    total = residual.clone()
    expected = reference.add_rms_norm(x, total, weight, 1e-5)
    got = cpu.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert_close(got, expected)
    # It is the norm of the sum, bit by bit.
    assert torch.equal(got, cpu.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_is_that_of_torch(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate, up = numbers(*shape, dtype, 1), numbers(*shape, dtype, 2)
    assert_close(cpu.silu_mul(gate, up), reference.silu_mul(gate, up))


def test_silu_mul_far_from_zero() -> None:
    gate = torch.tensor([[0.0, -0.0, 88.0, -88.0, -200.0, 1e30, -1e30, float("inf"), float("nan")]])
    got = cpu.silu_mul(gate, torch.ones_like(gate))
    expected = torch.tensor([[0.0, 0.0, 88.0, 0.0, 0.0, 1e30, 0.0, float("inf"), float("nan")]])
    assert torch.allclose(got, expected, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_row_do_not_depend_on_threads_or_company(dtype: torch.dtype) -> None:
    x, up = numbers(300, 777, dtype, 1), numbers(300, 777, dtype, 2)
    weight = torch.rand(777).to(dtype)
    norm, product = cpu.rms_norm(x, weight, 1e-5), cpu.silu_mul(x, up)
    for num_threads in (1, 5):
        _core.set_num_threads(num_threads)
        for start, end in [(0, 300), (0, 1), (17, 18), (100, 299)]:
            assert torch.equal(cpu.rms_norm(x[start:end], weight, 1e-5), norm[start:end])
            assert torch.equal(cpu.silu_mul(x[start:end], up[start:end]), product[start:end])


def test_wrong_arguments_are_named() -> None:
    x, weight = torch.zeros(2, 8), torch.ones(8)
    with pytest.raises(ValueError, match=r"weight is \[7\] of torch.float32, allowed: dense, \[8\]"):
        cpu.rms_norm(x, weight[:7], 1e-5)
    with pytest.raises(ValueError, match=r"residual is \[1, 8\] of torch.float32, allowed: \[2, 8\]"):
        cpu.add_rms_norm(x, x[:1], weight, 1e-5)
    with pytest.raises(ValueError, match=r"up is \[2, 8\] of torch.float16, allowed: \[2, 8\] of"):
        cpu.silu_mul(x, x.half())
    with pytest.raises(ValueError, match=r"dtype of x is torch.float64"):
        cpu.rms_norm(x.double(), weight.double(), 1e-5)
    with pytest.raises(ValueError, match="allowed: two dimensions, the last one dense"):
        cpu.rms_norm(x.T, torch.ones(2), 1e-5)
    with pytest.raises(ValueError, match="device of gate is meta, allowed: cpu"):
        cpu.silu_mul(x.to("meta"), x.to("meta"))
