"""The sampler draws the tokens that the reference draws: the same noise and masses, the same filters."""

import pytest
import torch

from host_device import HostDevice, checkout_sources
from pagedkv.batch import SamplingRows
from pagedkv.ops import INFINITE, NOT_A_NUMBER, exact, philox, reference
from pagedkv.ops.cuda import CudaOps
from pagedkv.ops.cuda_kernels import Kernel, ParamLayout

FIELDS = ("temperature", "top_p", "min_p", "top_k", "seed_low", "seed_high", "sample_index", "position")


# Applies the arithmetic of sampling to a number a thread.
NOISE = """
#include "common.cuh"
#include "noise.cuh"
struct NoiseParams {
  float* noise;
  int* masses;
  const int* words;
  const float* scores;
};
extern "C" __global__ void noise(const __grid_constant__ NoiseParams p) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  p.noise[i] = gumbel(p.words[i]);
  p.masses[i] = mass_of(p.scores[i]);
}
"""


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
    return SamplingRows(words)


def check(ops, logits, entries):
    sampling = rows(entries)
    given = ops.sample(logits, sampling)
    assert given.tolist() == reference.sample(logits, sampling).tolist()


def varied(count, **changes):
    return [
        {"seed_low": 77 + i, "seed_high": i * 1_000_003, "sample_index": i % 3, "position": 40 * i} | changes
        for i in range(count)
    ]


def is_exact(arch, sources):
    """Whether noise and masses of many numbers are the reference's to the last bit."""
    num_blocks, num_threads = 64, 1024
    generator = torch.Generator().manual_seed(8)
    size = num_blocks * num_threads
    words = torch.randint(-(1 << 31), 1 << 31, (size,), generator=generator).int()
    words[:4] = torch.tensor([0, -1, 511, -512])
    scores = -25 * torch.rand(size, generator=generator) ** 3
    scores[:6] = torch.tensor([0.0, -1e-8, -20.79, -20.8, -1e30, float("-inf")])
    noise, masses = torch.empty(size), torch.empty(size, dtype=torch.int32)
    sources = sources | {"noise.cu": NOISE}
    params = ParamLayout("noise", sources).pack(
        noise=noise.data_ptr(), masses=masses.data_ptr(), words=words.data_ptr(), scores=scores.data_ptr()
    )
    HostDevice(arch, sources=sources).load(Kernel("noise")).launch((num_blocks, 1), num_threads, 0, params)
    return torch.equal(noise, philox.gumbel_of_word(words.long() & 0xFFFFFFFF)) and torch.equal(
        masses.long(), exact.mass(scores)
    )


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_noise_and_masses_are_the_references_to_the_last_bit(arch):
    assert is_exact(arch, checkout_sources())


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


def test_a_row_with_nan_gets_no_token(ops):
    logits = torch.zeros(3, 64)
    logits[2, 60] = float("nan")
    assert ops.sample(logits, rows([{}, {"temperature": 0.0}, {}]))[1:].tolist() == [0, NOT_A_NUMBER]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_row_with_an_infinite_largest_logit_gets_no_token_unless_it_is_taken_greedily(ops, sign):
    logits = torch.full((2, 64), float("-inf"))
    logits[1, 60] = sign * float("inf")
    logits[0, 7] = 1
    check(ops, logits, [{}, {"temperature": 0.0}])
    assert ops.sample(logits, rows([{}, {}])).tolist() == [7, INFINITE]


def test_logits_that_the_kernel_cannot_read_are_refused(ops):
    with pytest.raises(ValueError, match=r"logits are torch.float16 with strides"):
        ops.sample(torch.zeros(1, 64).half(), rows([{}]))
    with pytest.raises(ValueError, match="rows of sampling are 2, allowed: 3"):
        ops.sample(torch.zeros(3, 64), rows([{}, {}]))
