"""Rotary position embeddings: the frequencies of each scaling kind, and the table of cosines and sines.

Element i of a head and element i + D/2 form a pair that is rotated by position * inv_freq[i] (Su et al.,
"RoFormer", 2021). The kinds stretch these frequencies so that a model reads further than it was trained.
`llama` owns one table and hands it to the operations. Arithmetic is float32 in the order of transformers: at
position 8,000 a frequency that differs in its last bit is an angle that differs visibly.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedkv.errors import ModelError

KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
# Stretches any trained length beyond every cache.
MAX_FACTOR = 2.0**24


@dataclass(frozen=True)
class RopeConfig:
    """The kind of RoPE and its numbers; those that a kind does not use keep their defaults."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_len: int = 0  # yarn, llama3: the length before stretching
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float = 1.0  # yarn: multiplies cosines and sines
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the bounds of the ramp are whole dimensions
    divisors: tuple[float, ...] = ()  # what each frequency is divided by, where the file lists it (GGUF)

    def __post_init__(self) -> None:
        """Checks the numbers that would otherwise give NaN or nonsense."""
        if self.kind not in KINDS:
            raise ModelError(f"RoPE of type {self.kind!r} is not supported; supported are {', '.join(KINDS)}")
        if self.theta <= 1:
            raise ModelError(f"rope_theta is {self.theta}; it must be above 1")
        if not 0 < self.factor <= MAX_FACTOR:
            raise ModelError(
                f"the RoPE factor is {self.factor}; it must be above 0 and at most {MAX_FACTOR:.0f}"
            )
        if self.kind in ("yarn", "llama3") and self.original_max_len < 1:
            raise ModelError(f"RoPE of type {self.kind} needs original_max_position_embeddings of at least 1")
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ModelError(
                f"low_freq_factor is {self.low_freq_factor} and high_freq_factor {self.high_freq_factor}; "
                "llama3 RoPE needs 0 < low < high"
            )
        if self.kind == "yarn" and not self.beta_fast >= self.beta_slow > 0:
            raise ModelError(
                f"beta_fast is {self.beta_fast}, beta_slow {self.beta_slow}; yarn RoPE needs fast >= slow > 0"
            )


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """What yarn multiplies cosines and sines by if the config is silent (Peng et al., "YaRN", 2023, 3.4)."""

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return temperature(mscale) / temperature(mscale_all_dim)
    return temperature(1.0)


def inv_freq(rope: RopeConfig, head_dim: int) -> Tensor:
    """The angle that one position turns each pair of elements by: f32 [head_dim / 2]."""
    # "dynamic" stretches nothing up to the trained length, and longer sequences are not served.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    periods: Tensor = rope.theta**exponents
    frequencies = 1.0 / periods
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.kind == "yarn":
        frequencies = _yarn(rope, periods, head_dim)
    if rope.divisors:
        if len(rope.divisors) != head_dim // 2:
            raise ModelError(f"{len(rope.divisors)} RoPE factors are given for {head_dim // 2} frequencies")
        frequencies = frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended (Llama 3.1's published code)."""
    wavelengths = 2 * math.pi / frequencies
    long, short = rope.original_max_len / rope.low_freq_factor, rope.original_max_len / rope.high_freq_factor
    blend = rope.original_max_len / wavelengths - rope.low_freq_factor
    blend = blend / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * frequencies / rope.factor + blend * frequencies
    result = torch.where(wavelengths > long, frequencies / rope.factor, frequencies)
    return torch.where((wavelengths >= short) & (wavelengths <= long), blended, result)


def _yarn(rope: RopeConfig, periods: Tensor, head_dim: int) -> Tensor:
    """A ramp over the dimensions, from kept to stretched (Peng et al., "YaRN", 2023, 3.2)."""

    def dimension(num_rotations: float) -> float:
        turns = rope.original_max_len / (num_rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


def cos_sin_table(rope: RopeConfig, head_dim: int, max_len: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions below max_len, each f32 [max_len, head_dim].

    Columns i and i + head_dim / 2 hold the same angle. Takes no more memory than `table_bytes` on the way.
    """
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inv_freq(rope, head_dim)[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    # In place, because the table of a long context is as large as a small model.
    return angles.cos().mul_(rope.attention_factor), angles.sin_().mul_(rope.attention_factor)


def table_bytes(head_dim: int, max_len: int) -> int:
    """Bytes of what `cos_sin_table` returns."""
    return 2 * max_len * head_dim * torch.float32.itemsize
