"""Logarithm and exponential that every backend computes to the last bit: fused multiply-adds in float32.

Sampling compares sums of logits and noise, and sums of probabilities with a limit. No two libraries agree on
the last bits of log and exp, so these are polynomials, whose every operation is rounded as written here; the
Rust kernels (`rust/cpu/noise.rs`) and the CUDA ones have an instruction for each of them. Only sampling calls
these functions.
"""

from typing import Final

import torch
from torch import Tensor

# The mass of the most likely token. Masses are integers, so that their sums do not depend on an order.
UNIT_MASS: Final = 1 << 30

# (ln(1 + f) - f) / f^2, ascending powers, for f in [sqrt(1/2) - 1, sqrt(2) - 1]; relative error of ln 5e-9.
_LN: Final = (
    -0.49999988,
    0.33333325,
    -0.25001585,
    0.20001985,
    -0.16609056,
    0.14181632,
    -0.13242984,
    0.1290552,
    -0.07623077,
)
# (2^f - 1) / f for f in [-1/2, 1/2].
_EXP2: Final = (0.6931472, 0.24022648, 0.055503324, 0.009618437, 0.0013398874, 0.00015353362)
_LN_2, _LOG2_E = 0.6931472, 1.442695
# Adding 1.5 * 2^23 rounds a small number to the nearest integer.
_ROUND_TO_INTEGER: Final = 12_582_912.0
# Below it 2^x is less than the unit of masses.
_EXP2_MIN: Final = -100.0
# The bits of sqrt(1/2), where the significand of the logarithm's argument begins.
_SQRT_HALF_BITS: Final = 0x3F3504F3


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The sum a * b + c of float32 tensors, rounded once, as the instruction does it.

    The product is exact in float64. The sum is rounded there to odd, which keeps the second rounding, to
    float32, from seeing a tie that is none (Boldo and Melquiond, "Emulation of FMA and correctly rounded
    sums: proved algorithms using rounding to odd", 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    odd = torch.where((error != 0) & (bits % 2 == 0), bits + away, bits)
    return odd.view(torch.float64).float()


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    numbers = [torch.full_like(x, coefficient) for coefficient in coefficients]
    total = numbers[-1]
    for number in reversed(numbers[:-1]):
        total = multiply_add(total, x, number)
    return total


def ln(x: Tensor) -> Tensor:
    """Natural logarithm of f32 numbers, normal and above zero."""
    shifted = x.view(torch.int32) - _SQRT_HALF_BITS
    exponent = (shifted >> 23).float()
    f = ((shifted & 0x007FFFFF) + _SQRT_HALF_BITS).view(torch.float32) - 1.0
    near_one = multiply_add(f * f, _polynomial(_LN, f), f)
    return multiply_add(exponent, torch.full_like(x, _LN_2), near_one)


def mass(score: Tensor) -> Tensor:
    """The power e^score in units of 2^-30, rounded down: f32 scores of at most zero -> i64."""
    x = (score * torch.tensor(_LOG2_E, dtype=torch.float32)).clamp(min=_EXP2_MIN)
    whole = (x + _ROUND_TO_INTEGER) - _ROUND_TO_INTEGER
    f = x - whole
    power = multiply_add(_polynomial(_EXP2, f), f, torch.ones_like(f))
    return torch.ldexp(power.double(), whole.double() + 30).to(torch.int64)
