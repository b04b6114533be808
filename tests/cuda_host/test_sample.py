"""The sampler draws the tokens that the reference draws: the same words of Philox, the same filters."""

import pytest
import torch

from host_device import HostDevice
from pagedkv.batch import SamplingRows
from pagedkv.ops import reference
from pagedkv.ops.cuda import CudaOps

FIELDS = ("temperature", "top_p", "min_p", "top_k", "seed_low", "seed_high", "sample_index", "position")


@pytest.fixture(scope="module")
def ops():
    return CudaOps(HostDevice(seed=2))


def rows(entries):
    """Sampling parameters of rows given as dicts, all others neutral."""
    words = torch.zeros((len(entries), 9), dtype=torch.int32)
    for words_of_row, entry in zip(words, entries, strict=True):
        values = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0} | entry
        floats = torch.tensor([values["temperature"], values["top_p"], values["min_p"]])
        words_of_row[:3] = floats.view(torch.int32)
        for column, name in enumerate(FIELDS[3:], start=3):
            words_of_row[column] = values.get(name, 0)
    return SamplingRows.from_words(words)


def check(ops, logits, entries):
    sampling = rows(entries)
    given = ops.sample(logits, sampling)
    assert given.tolist() == reference.sample(logits, sampling).tolist()


def varied(count, **changes):
    return [
        {"seed_low": 77 + i, "seed_high": i * 1_000_003, "sample_index": i % 3, "position": 40 * i} | changes
        for i in range(count)
    ]


def test_greedy_and_ties(ops):
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1))
    logits[1, [77, 500, 999]] = 9.0
    logits[2, 10:] = -0.0
    logits[2, :10] = torch.tensor([-1.0, 0.0]).repeat(5)
    check(ops, logits, [{"temperature": 0.0}] * 3)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 1e4},
        {"top_k": 1},
        {"top_k": 40},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"min_p": 0.1},
        {"top_k": 200, "top_p": 0.7, "min_p": 0.02, "temperature": 1.7},
    ],
)
def test_draws_what_the_reference_draws(ops, changes):
    logits = 2 * torch.randn(6, 3001, generator=torch.Generator().manual_seed(4))
    check(ops, logits, varied(6, **changes))


@pytest.mark.parametrize("changes", [{"top_k": 7}, {"top_p": 0.4}, {"top_k": 100, "top_p": 0.5}])
def test_equal_logits_rank_by_id(ops, changes):
    logits = torch.randn(4, 400, generator=torch.Generator().manual_seed(2)).mul(2).round()
    logits[3] = 0
    check(ops, logits, varied(4, **changes))


def test_masked_tokens_are_never_drawn(ops):
    logits = torch.full((3, 500), float("-inf"))
    logits[:, [3, 170, 171]] = torch.tensor([1.0, 1.5, 0.5])
    check(ops, logits, varied(3))
    check(ops, logits, varied(3, top_p=0.8, temperature=2.0))


def test_a_mixed_batch(ops):
    logits = torch.randn(4, 129, generator=torch.Generator().manual_seed(3))
    check(ops, logits, [{"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.5, "seed_high": -5}, {"position": 9}])


def test_nan_is_an_error(ops):
    logits = torch.zeros(3, 64)
    logits[2, 60] = float("nan")
    with pytest.raises(ValueError, match="row 2 of the logits holds NaN"):
        ops.sample(logits, rows([{}, {"temperature": 0.0}, {}]))
