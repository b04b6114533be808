"""The torch operations against arithmetic that is written out, and the definition of the noise."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from arena_writer import sampling_words, write_arena
from pagedkv import ops
from pagedkv.batch import SamplingRows, StepBatch
from pagedkv.errors import BackendUnavailable
from pagedkv.ops import choose, philox, reference


def rows(*fields: dict[str, Any]) -> SamplingRows:
    words = [sampling_words(**row) for row in fields]
    return SamplingRows(torch.tensor(words, dtype=torch.int32))


def draws(logits: Tensor, num_draws: int, **fields: Any) -> list[int]:
    """Many draws from one row of logits, one for each position."""
    sampling = rows(*({"position": position, **fields} for position in range(num_draws)))
    tokens: list[int] = reference.sample(logits.expand(num_draws, -1).contiguous(), sampling).tolist()
    return tokens


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_words(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    k0, k1 = (torch.tensor([word]) for word in key)
    assert tuple(int(word) for word in philox.philox4x32((c0, c1, c2, c3), (k0, k1))) == expected


def test_noise_is_laid_out_by_token_position_sample_and_seed() -> None:
    seed_low, seed_high, position, sample_index = (torch.tensor([word]) for word in (11, 12, 13, 14))
    noise = philox.gumbel_noise(seed_low, seed_high, position, sample_index, vocab_size=10)
    assert noise.shape == (1, 10)
    for token_id in range(10):
        counter = (torch.tensor([token_id >> 2]), position, sample_index, torch.tensor([0]))
        word = int(philox.philox4x32(counter, (seed_low, seed_high))[token_id & 3])
        u = ((word >> 9) + 0.5) / 2**23
        assert float(noise[0, token_id]) == pytest.approx(-math.log(-math.log(u)), rel=1e-6)


def test_the_largest_and_smallest_words_give_finite_noise() -> None:
    noise = philox.gumbel_of_word(torch.tensor([0, 0xFFFFFFFF]))
    assert noise.tolist() == pytest.approx([-math.log(24 * math.log(2)), 24 * math.log(2)], rel=1e-6)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    num_draws = 20_000
    counts = torch.bincount(torch.tensor(draws(logits, num_draws, temperature=0.8, seed=5)), minlength=5)
    expected = torch.softmax(logits / 0.8, 0) * num_draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 18.5, counts  # 0.1 % of fair draws lie beyond, with four degrees of freedom


@pytest.mark.parametrize("field", ["seed", "sample_index", "position"])
def test_each_part_of_the_key_changes_the_draw(field: str) -> None:
    logits = torch.zeros(2, 5000)
    values = [1, 1 + (1 << 32)] if field == "seed" else [1, 2]
    first, second = reference.sample(logits, rows(*({"temperature": 1.0, field: v} for v in values))).tolist()
    assert first != second


def test_a_row_is_drawn_alike_alone_and_among_others() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 300, generator=generator)
    fields = [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9, "seed": 3, "position": 9},
        {"temperature": 1.5, "top_k": 20, "seed": 4},
        {"temperature": 1.0, "min_p": 0.05, "seed": 5, "sample_index": 2},
        {"temperature": 1.0, "seed": 6},
        {"temperature": 100.0, "seed": 7},
    ]
    together = reference.sample(logits, rows(*fields)).tolist()
    alone = [int(reference.sample(logits[i : i + 1], rows(fields[i]))) for i in range(6)]
    assert together == alone
    assert together[0] == int(logits[0].argmax())


LOGITS = torch.log(torch.tensor([0.05, 0.4, 0.15, 0.1, 0.3]))


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 2}, {1, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": -1}, {0, 1, 2, 3, 4}),
        ({"top_k": 500}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.69}, {1, 4}),
        ({"top_p": 0.71}, {1, 4, 2}),
        ({"top_p": 1e-6}, {1}),
        # Within the two best, token 1 has 0.57 of the mass: it suffices, though alone it has but 0.4.
        ({"top_k": 2, "top_p": 0.5}, {1}),
        ({"top_k": 2, "top_p": 0.6}, {1, 4}),
        ({"min_p": 0.3}, {1, 4, 2}),
        ({"min_p": 1.0}, {1}),
        ({"min_p": 0.3, "top_p": 0.5}, {1, 4}),
    ],
)
def test_filters_keep_exactly_these_tokens(fields: dict[str, Any], kept: set[int]) -> None:
    assert set(draws(LOGITS, 500, temperature=1.0, **fields)) == kept


def test_temperature_comes_before_the_filters() -> None:
    # At temperature 0.5 the masses are squared: 0.16 and 0.09 of 0.285, so the best alone has 0.56.
    assert set(draws(LOGITS, 300, temperature=0.5, top_p=0.55)) == {1}
    assert set(draws(LOGITS, 300, temperature=1.0, top_p=0.55)) == {1, 4}


def test_equal_logits_rank_by_token_id() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0])
    assert draws(logits, 1) == [1]
    assert set(draws(logits, 200, temperature=1.0, top_k=1)) == {1}
    assert set(draws(logits, 200, temperature=1.0, top_k=2)) == {1, 2}
    assert set(draws(logits, 200, temperature=1.0, top_p=0.1)) == {1}


def test_extreme_logits_and_temperatures_stay_finite() -> None:
    logits = torch.tensor([-3e38, 3e38, 0.0, -math.inf])
    assert set(draws(logits, 50, temperature=1e-6, top_p=0.9)) == {1}
    assert set(draws(torch.zeros(3), 200, temperature=100.0)) == {0, 1, 2}


def test_logprobs_are_those_before_temperature_and_filters() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 50, generator=generator) * 4
    chosen = torch.tensor([4, 0, 49])
    chosen_logprob, top_ids, top_logprobs = reference.logprobs(logits, chosen, 5)
    expected = torch.log_softmax(logits.double(), -1)
    assert torch.allclose(chosen_logprob.double(), expected[torch.arange(3), chosen], atol=1e-5)
    assert torch.equal(top_ids, expected.topk(5).indices)
    assert torch.allclose(top_logprobs.double(), expected.topk(5).values, atol=1e-5)
    assert reference.logprobs(logits, chosen, 0)[1].shape == (3, 0)
    # Ties rank by token id here as well.
    assert reference.logprobs(torch.zeros(1, 9), torch.tensor([8]), 3)[1].tolist() == [[0, 1, 2]]


def test_rms_norm() -> None:
    x, weight = torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([2.0, 1.0])
    scale = 1 / math.sqrt(12.5 + 1e-6)
    expected = [[6 * scale, 4 * scale], [0.0, 0.0]]
    assert torch.allclose(reference.rms_norm(x, weight, 1e-6), torch.tensor(expected))


def test_silu_mul() -> None:
    gate, up = torch.tensor([[0.0, 1.0, -2.0]]), torch.tensor([[5.0, 2.0, 3.0]])
    expected = [[0.0, 2 / (1 + math.exp(-1)), -6 / (1 + math.exp(2))]]
    assert torch.allclose(reference.silu_mul(gate, up), torch.tensor(expected))


def test_rope_cache_rotates_pairs_and_writes_only_the_slots() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(3, heads, 8, generator=generator) for heads in (4, 2, 2))
    angles = torch.rand(20, 4, generator=generator) * 6
    doubled = torch.cat((angles, angles), -1)
    positions = torch.tensor([7, 0, 19], dtype=torch.int32)
    slots = torch.tensor([13, 4, 9], dtype=torch.int32)
    key_cache, value_cache = torch.full((2, 4, 2, 4, 8), math.nan)
    rotated = reference.rope_cache(
        q, k, v, doubled.cos(), doubled.sin(), positions, key_cache, value_cache, slots
    )

    def turned(x: Tensor) -> Tensor:
        # A pair (i, i + D/2) as a complex number, times e^(i angle).
        turns = torch.polar(torch.ones(3, 1, 4), angles[positions][:, None])
        pairs = torch.complex(x[..., :4], x[..., 4:]) * turns
        return torch.cat((pairs.real, pairs.imag), -1)

    assert torch.allclose(rotated, turned(q), atol=1e-6)
    for token, slot in enumerate(slots.tolist()):
        assert torch.allclose(key_cache[slot // 4, :, slot % 4], turned(k)[token], atol=1e-6)
        assert torch.equal(value_cache[slot // 4, :, slot % 4], v[token])
    assert int(key_cache.isnan().all(-1).sum()) == 4 * 2 * 4 - 3 * 2
    assert int(value_cache.isnan().all(-1).sum()) == 4 * 2 * 4 - 3 * 2


def test_attention_over_shuffled_blocks_equals_sums_written_out() -> None:
    generator = torch.Generator().manual_seed(3)
    # Two decodes and a chunk of a prompt: 4 query heads on 2 key heads of 8 elements, blocks of 4.
    lengths, num_queries, tables = [5, 9, 7], [1, 1, 3], [[6, 2], [1, 9, 4], [8, 3]]
    keys = [torch.randn(length, 2, 8, generator=generator) for length in lengths]
    values = [torch.randn(length, 2, 8, generator=generator) for length in lengths]
    key_cache, value_cache = torch.full((2, 10, 2, 4, 8), math.nan)
    for s, table in enumerate(tables):
        for position in range(lengths[s]):
            key_cache[table[position // 4], :, position % 4] = keys[s][position]
            value_cache[table[position // 4], :, position % 4] = values[s][position]
    positions = [p for length, n in zip(lengths, num_queries, strict=True) for p in range(length - n, length)]
    sections: list[list[int]] = [[] for _ in range(15)]
    sections[2], sections[4], sections[5] = positions, [0, 1, 2, 5], lengths
    sections[6], sections[7] = [0, 2, 5, 7], [block for table in tables for block in table]
    q = torch.randn(5, 4, 8, generator=generator)
    batch = StepBatch.from_arena(write_arena(sections), 2)
    out = reference.paged_attention(q, key_cache, value_cache, batch, 0.3)
    for token, (s, position) in enumerate(zip([0, 1, 2, 2, 2], positions, strict=True)):
        for head in range(4):
            scores = [
                math.exp(0.3 * float(q[token, head] @ keys[s][p, head // 2])) for p in range(position + 1)
            ]
            weights = torch.tensor(scores) / sum(scores)
            expected = weights @ values[s][: position + 1, head // 2]
            assert torch.allclose(out[token, head], expected, atol=1e-5)


def test_copies_read_all_sources_before_they_write() -> None:
    numbers = torch.arange(4.0).view(4, 1, 1, 1)
    layers = [(numbers.clone(), numbers + 10) for _ in range(2)]
    reference.copy_blocks(layers, torch.tensor([[1, 2], [2, 3]], dtype=torch.int32))
    for key_cache, value_cache in layers:
        assert key_cache.flatten().tolist() == [0, 1, 1, 2]
        assert value_cache.flatten().tolist() == [10, 11, 11, 12]
    reference.copy_blocks(layers, torch.empty((0, 2), dtype=torch.int32))


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_backends_are_chosen_by_name(name: str) -> None:
    assert choose(name).name == name


@pytest.mark.parametrize("name", ["tpu", "auto"])
def test_an_unknown_backend_is_refused(name: str) -> None:
    with pytest.raises(BackendUnavailable, match=f"'{name}', allowed: reference, cpu, cuda"):
        choose(name)


def test_without_a_gpu_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match='torch sees no GPU; use device="cpu"'):
        choose("cuda")


def test_without_kernels_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ops, "has_cuda_kernels", lambda: False)
    with pytest.raises(BackendUnavailable, match=r'no CuPy, .* use device="cpu" .*--device cpu'):
        choose("cuda")


def test_what_the_kernels_lack_is_not_taken_for_missing_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise ModuleNotFoundError("No module named 'cupy'", name="cupy")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ops, "has_cuda_kernels", lambda: True)
    monkeypatch.setattr(ops.importlib, "import_module", load)
    with pytest.raises(ModuleNotFoundError, match="cupy"):
        choose("cuda")
