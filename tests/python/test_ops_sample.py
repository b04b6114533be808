"""Sampling on the CPU against the reference: the same tokens, whatever the row; and arithmetic to the bit."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from arena_writer import sampling_words
from pagedkv import _core
from pagedkv.batch import SamplingRows
from pagedkv.ops import cpu, exact, reference, unsampled


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = _core.num_threads()
    _core.set_num_threads(2)
    yield
    _core.set_num_threads(before)


def rows(*fields: dict[str, Any]) -> SamplingRows:
    return SamplingRows(torch.tensor([sampling_words(**row) for row in fields], dtype=torch.int32))


def logits_of(kind: str, num_rows: int, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 4
    match kind:
        case "ties":
            return logits.round()
        case "equal":
            return torch.zeros_like(logits)
        case "masked":
            logits[:, 1:].masked_fill_(logits[:, 1:] > 3, -math.inf)
            return logits
        case "huge":
            return logits * 1e37
        case "near":
            # Differences of single units in the last place, and of less than the unit of masses.
            return 100.0 + logits.round() * 2**-17
        case _:
            return logits


KINDS = ["plain", "ties", "equal", "masked", "huge", "near"]
FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "top_k": 5, "top_p": 0.1},
    {"temperature": 1.0},
    {"temperature": 1e-6},
    {"temperature": 1e6},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 3.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 2},
    {"temperature": 1.5, "top_k": 40},
    {"temperature": 1.0, "top_k": 700},
    {"temperature": 1.0, "top_k": 10**6},
    {"temperature": 1.0, "top_k": -1},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 2.0, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 1.0, "top_p": 1e-7},
    {"temperature": 1.0, "top_k": 30, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 30, "top_p": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.7, "top_k": 100, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize("vocab_size", [1, 3, 63, 64, 65, 1000, 5003])
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_the_reference(kind: str, vocab_size: int) -> None:
    fields = [
        {"seed": 7919 * idx - 2**40, "position": 11 * idx, "sample_index": idx % 3, **filters}
        for idx, filters in enumerate(FILTERS * 4)
    ]
    logits = logits_of(kind, len(fields), vocab_size)
    expected = reference.sample(logits, rows(*fields))
    assert torch.equal(cpu.sample(logits, rows(*fields)), expected)
    # A row alone, and rows of a wider tensor, on another number of threads.
    _core.set_num_threads(1)
    wide = torch.full((len(fields), vocab_size + 5), math.nan)
    wide[:, 2 : 2 + vocab_size] = logits
    assert torch.equal(cpu.sample(wide[:, 2 : 2 + vocab_size], rows(*fields)), expected)
    for row in range(0, len(fields), 5):
        assert cpu.sample(logits[row : row + 1], rows(fields[row])).tolist() == [int(expected[row])]


def test_a_whole_vocabulary() -> None:
    fields = [{"seed": idx, **filters} for idx, filters in enumerate(FILTERS)]
    logits = logits_of("plain", len(fields), 49_152)
    assert torch.equal(cpu.sample(logits, rows(*fields)), reference.sample(logits, rows(*fields)))


def test_no_rows() -> None:
    none = SamplingRows(torch.empty((0, 9), dtype=torch.int32))
    assert cpu.sample(torch.empty(0, 10), none).tolist() == []


@pytest.mark.parametrize("ops", [cpu, reference])
def test_a_row_that_cannot_be_sampled_costs_the_others_nothing(ops: Any) -> None:
    greedy, drawn = {"temperature": 0.0}, {"temperature": 1.0}
    for fields in (greedy, drawn, {"temperature": 1.0, "top_p": 0.9}):
        logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(2))
        expected = ops.sample(logits, rows(fields, fields, fields)).tolist()
        logits[1, 69] = math.nan
        assert ops.sample(logits, rows(fields, fields, fields)).tolist() == [expected[0], -1, expected[2]]
    for value in (math.inf, -math.inf):
        logits = torch.zeros(3, 70)
        expected = ops.sample(logits, rows(greedy, drawn, drawn)).tolist()
        logits[1] = value
        assert ops.sample(logits, rows(greedy, drawn, drawn)).tolist() == [0, -2, expected[2]]
        assert ops.sample(logits, rows(greedy, greedy, greedy)).tolist() == [0, 0, 0]


def test_what_is_wrong_with_a_row_is_said() -> None:
    assert unsampled(np.array([0, 5], np.int32)) is None
    says = [str(unsampled(np.array([3, token, 7], np.int32))) for token in (-1, -2)]
    assert says[0] == "row 1 of the logits is NaN somewhere, allowed: numbers"
    assert says[1] == "row 1 of the logits is infinite at its largest, allowed: numbers"


def test_wrong_arguments_are_named() -> None:
    logits = torch.zeros(2, 10)
    with pytest.raises(ValueError, match="rows of sampling are 1, allowed: 2"):
        cpu.sample(logits, rows({}))
    with pytest.raises(ValueError, match=r"dtype of logits is torch.bfloat16, allowed: torch.float32"):
        cpu.sample(logits.bfloat16(), rows({}, {}))
    with pytest.raises(ValueError, match=r"chosen\[1\] is 10, allowed: 0 to 9"):
        cpu.logprobs(logits, torch.tensor([0, 10]), 1)
    with pytest.raises(ValueError, match=r"chosen is \[1\] of torch.int64, allowed: \[2\]"):
        cpu.logprobs(logits, torch.tensor([0]), 1)


@pytest.mark.parametrize("ops", [cpu, reference])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logprobs_of_a_row_without_any_are_nan(ops: Any, value: float) -> None:
    logits = torch.zeros(2, 10)
    logits[1, 3] = value
    chosen, ids, top = ops.logprobs(logits, torch.tensor([0, 0]), 2)
    assert (chosen.isnan().tolist(), top.isnan().all(1).tolist()) == ([False, True], [False, True])
    assert (ids.shape, ids[0].tolist()) == ((2, 2), [0, 1])
    assert chosen[0] == top[0, 0] == pytest.approx(-math.log(10))


@pytest.mark.parametrize("k", [0, 1, 5, 20, 1000])
@pytest.mark.parametrize("kind", ["plain", "ties", "equal", "masked"])
@pytest.mark.parametrize("vocab_size", [1, 50, 1003])
def test_logprobs_are_those_of_the_reference(vocab_size: int, kind: str, k: int) -> None:
    logits = logits_of(kind, 3, vocab_size)
    chosen = torch.tensor([0, vocab_size // 2, vocab_size - 1])
    expected = reference.logprobs(logits, chosen, k)
    got = cpu.logprobs(logits, chosen, k)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
    assert torch.allclose(got[0], expected[0], atol=2e-6, rtol=1e-6)
    assert torch.allclose(got[2], expected[2], atol=2e-6, rtol=1e-6)
    # Where two are closer than rounding, the order may differ: then they are still the same values.
    assert torch.allclose(torch.log_softmax(logits, -1).gather(1, got[1]), expected[2], atol=2e-6, rtol=1e-6)
    if kind != "masked":
        assert torch.equal(got[1][:, :1], expected[1][:, :1])


def test_multiply_add_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 2000, generator=generator)
    # Sums that nearly cancel, sums far apart, and ties.
    scale = 2.0 ** torch.randint(-40, 40, (2000,), generator=generator)
    c = torch.where(torch.rand(2000, generator=generator) < 0.5, -(a * b), a * scale)
    got = exact.multiply_add(a, b, c)
    for x, y, z, result in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
        # Fractions of floats are exact, and so is their sum; only the last conversion rounds.
        total = math.fsum(fractions(x, y, z))
        assert result == pytest.approx(total, rel=2**-24, abs=0.0)
    one = torch.tensor([1.0])
    tiny = torch.tensor([2.0**-60])
    assert exact.multiply_add(one, tiny, torch.tensor([1 + 2.0**-23])).item() == 1 + 2.0**-23
    half = torch.tensor([1.0 + 2.0**-12])
    # (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24: a tie in float32, which the last addend decides.
    assert exact.multiply_add(half, half, tiny).item() == 1 + 2.0**-11 + 2.0**-23
    assert exact.multiply_add(half, half, -tiny).item() == 1 + 2.0**-11


def fractions(x: float, y: float, z: float) -> list[float]:
    """x * y + z as a list of floats that sum to it exactly: the product of two float32 is a float64."""
    return [x * y, z]


def test_ln_and_mass_are_accurate() -> None:
    x = torch.logspace(-24, 4, 4001, base=2.0)
    assert torch.allclose(exact.ln(x).double(), x.double().log(), rtol=2e-7, atol=1e-7)
    score = -torch.linspace(0, 25, 4001)
    expected = score.double().exp() * exact.UNIT_MASS
    assert ((exact.mass(score) - expected).abs() <= 1 + 4e-6 * expected).all()
    assert exact.mass(torch.tensor([0.0, -math.inf])).tolist() == [exact.UNIT_MASS, 0]
