"""The CPU kernels against a plain float64 computation: values, bits that must not move, and refusals."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedkv import _core
from pagedkv.ops import cpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half a unit in the last place of a number near one, with room for the sums.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@dataclass
class Tables:
    """The part of a step's batch that attention reads."""

    query_start: Tensor
    seq_lens: Tensor
    table_start: Tensor
    block_ids: Tensor
    prepared: dict[str, Any] = field(default_factory=dict, init=False)


@dataclass
class Step:
    """A step with its caches, and the same context as dense tensors."""

    q: Tensor
    key_cache: Tensor
    value_cache: Tensor
    batch: Tables
    keys: list[Tensor]
    values: list[Tensor]

    def attend(self) -> Tensor:
        scale = self.q.shape[-1] ** -0.5
        return cpu.paged_attention(self.q, self.key_cache, self.value_cache, self.batch, scale)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = _core.num_threads(), torch.get_num_threads()
    _core.set_num_threads(2)
    # The expected results are small pieces of work, for which torch's threads would mostly wait for each
    # other.
    torch.set_num_threads(1)
    yield
    _core.set_num_threads(before[0])
    torch.set_num_threads(before[1])


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def make_step(
    lengths: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    spread: float = 1.0,
) -> Step:
    """A step of sequences given as (tokens in the step, tokens in the cache).

    Tables are shuffled and have a block to spare; every slot without a token is NaN, the null block included.
    """
    generator = torch.Generator().manual_seed(1)
    num_heads, num_kv_heads = heads
    table_lens = [-(-seq_len // block_size) + 1 for _, seq_len in lengths]
    num_blocks = sum(table_lens) + 2
    shuffled = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(2)) + 1
    block_ids = shuffled[: sum(table_lens)].int()
    key_cache = torch.full((num_blocks, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    value_cache = key_cache.clone()
    keys, values = [], []
    for (_, seq_len), table in zip(lengths, block_ids.long().split(table_lens), strict=True):
        position = torch.arange(seq_len)
        for dense, cache in ((keys, key_cache), (values, value_cache)):
            rows = torch.randn(seq_len, num_kv_heads, head_dim, generator=generator).to(dtype)
            cache[table[position // block_size], :, position % block_size] = rows
            dense.append(rows)
    num_tokens = sum(query_len for query_len, _ in lengths)
    q = (torch.randn(num_tokens, num_heads, head_dim, generator=generator) * spread).to(dtype)
    tables = Tables(
        query_start=starts([query_len for query_len, _ in lengths]),
        seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32),
        table_start=starts(table_lens),
        block_ids=block_ids,
    )
    return Step(q, key_cache, value_cache, tables, keys, values)


def exact(step: Step) -> Tensor:
    """Attention in float64 over the dense context."""
    out = torch.empty(step.q.shape, dtype=torch.float64)
    query_start = step.batch.query_start.tolist()
    repeat = step.q.shape[1] // step.key_cache.shape[1]
    for s, (keys, values) in enumerate(zip(step.keys, step.values, strict=True)):
        q = step.q[query_start[s] : query_start[s + 1]].double()
        scores = torch.einsum("qhd,khd->hqk", q, keys.double().repeat_interleave(repeat, 1))
        position = torch.arange(len(keys) - len(q), len(keys))
        future = torch.arange(len(keys)) > position[:, None]
        weights = (scores * q.shape[-1] ** -0.5).masked_fill(future, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, values.double().repeat_interleave(repeat, 1))
        out[query_start[s] : query_start[s + 1]] = mixed
    return out


def assert_exact(step: Step) -> None:
    expected = exact(step)
    error = (step.attend().double() - expected).abs().max()
    assert error <= TOLERANCE[step.q.dtype] * expected.abs().max()


MIXED = [(1, 1), (1, 2), (1, 300), (1, 257), (0, 9), (7, 50), (33, 300), (70, 70)]


@pytest.mark.parametrize("block_size", [1, 4, 16, 64, 256])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_mixed_batch_is_exact(head_dim: int, block_size: int) -> None:
    assert_exact(make_step(MIXED, head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize(
    "heads", [(1, 1), (5, 5), (4, 2), (9, 3), (4, 1), (10, 2), (6, 1), (7, 1), (8, 1), (71, 1)]
)
def test_every_ratio_of_heads_is_exact(heads: tuple[int, int]) -> None:
    assert_exact(make_step(MIXED, heads=heads, head_dim=48))


@pytest.mark.parametrize("head_dim", [1, 7, 17, 63, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_head_sizes_are_exact(dtype: torch.dtype, head_dim: int) -> None:
    assert_exact(make_step(MIXED, head_dim=head_dim, block_size=8, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_every_type_is_exact(dtype: torch.dtype, block_size: int) -> None:
    assert_exact(make_step(MIXED, heads=(9, 3), block_size=block_size, dtype=dtype))


@pytest.mark.parametrize("seq_len", [255, 256, 257, 511, 512, 513, 1500])
def test_contexts_around_the_split_length_are_exact(seq_len: int) -> None:
    assert_exact(make_step([(1, seq_len), (3, seq_len), (20, seq_len)]))


def test_sharp_attention_is_exact() -> None:
    # Scores that differ by hundreds: most weights underflow, also those of whole splits. A score of hundreds
    # is itself only exact to some 1e-5 in float32, hence the wider tolerance.
    step = make_step(MIXED, spread=100.0)
    assert (step.attend().double() - exact(step)).abs().max() < 1e-3


def test_a_cache_of_another_type_than_the_queries() -> None:
    step = make_step(MIXED, dtype=torch.bfloat16)
    step.q = step.q.float()
    expected = exact(step)
    assert (step.attend().double() - expected).abs().max() < 1e-5


def test_strided_queries_and_caches() -> None:
    step = make_step(MIXED)
    expected = step.attend()
    num_tokens, num_heads, head_dim = step.q.shape
    wide = torch.full((num_tokens, num_heads + 3, head_dim), float("nan"))
    wide[:, 2:-1] = step.q
    both = torch.stack((step.key_cache, step.value_cache), dim=2)
    swapped = replace(step, q=wide[:, 2:-1], key_cache=both[:, :, 0], value_cache=both[:, :, 1])
    assert not swapped.key_cache.is_contiguous()
    assert torch.equal(swapped.attend(), expected)


def test_no_tokens() -> None:
    assert make_step([]).attend().shape == (0, 6, 64)
    assert make_step([(0, 5), (0, 0)]).attend().shape == (0, 6, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(9, 3), (4, 4), (8, 1)])
def test_bits_do_not_depend_on_chunks_threads_or_company(heads: tuple[int, int], dtype: torch.dtype) -> None:
    length = 600
    whole = make_step([(length, length)], heads=heads, dtype=dtype)
    expected = whole.attend()
    others = make_step([(1, 700), (40, 333)], heads=heads, dtype=dtype)

    def chunk(start: int, end: int, *, company: bool) -> Tensor:
        batch = Tables(
            query_start=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            table_start=torch.tensor([0, len(whole.batch.block_ids)], dtype=torch.int32),
            block_ids=whole.batch.block_ids,
        )
        step = replace(whole, q=whole.q[start:end], batch=batch)
        if not company:
            return step.attend()
        shift = len(whole.key_cache)
        joined = Tables(
            query_start=torch.cat((batch.query_start, others.batch.query_start[1:] + (end - start))),
            seq_lens=torch.cat((batch.seq_lens, others.batch.seq_lens)),
            table_start=torch.cat((batch.table_start, others.batch.table_start[1:] + len(batch.block_ids))),
            block_ids=torch.cat((batch.block_ids, others.batch.block_ids + shift)),
        )
        return Step(
            torch.cat((step.q, others.q)),
            torch.cat((whole.key_cache, others.key_cache)),
            torch.cat((whole.value_cache, others.value_cache)),
            joined,
            [],
            [],
        ).attend()[: end - start]

    for num_threads in (1, 2, 5):
        _core.set_num_threads(num_threads)
        assert torch.equal(whole.attend(), expected)
        for start, end in [(599, 600), (255, 256), (256, 257), (0, 1), (513, 514)]:
            assert torch.equal(chunk(start, end, company=False), expected[start:end])
            assert torch.equal(chunk(start, end, company=True), expected[start:end])
        for start in range(0 if num_threads == 2 else 560, length, 7):
            end = min(start + 7, length)
            assert torch.equal(chunk(start, end, company=False), expected[start:end])
        assert torch.equal(chunk(250, 600, company=True), expected[250:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_bits_do_not_depend_on_shared_blocks(dtype: torch.dtype, num_threads: int) -> None:
    # Sequences that share nothing, 256, 512 and 768 positions with others, one of them with other lengths.
    _core.set_num_threads(num_threads)
    lengths = [(1, 800), (1, 769), (1, 1100), (1, 530), (2, 700), (1, 257), (30, 900), (1, 256), (1, 768)]
    # Chunks of prompts, which with many rows are several tiles.
    lengths += [(29 + idx, 800 + 9 * idx) for idx in range(6)]
    step = make_step([(query_len, seq_len + 256) for query_len, seq_len in lengths], dtype=dtype)
    table_start = step.batch.table_start.tolist()
    tables = [step.batch.block_ids[start:end] for start, end in itertools.pairwise(table_start)]
    for idx, num_shared in [
        (1, 768),
        (2, 512),
        (3, 256),
        (4, 768),
        (5, 256),
        (6, 768),
        (7, 256),
        (8, 1000),
    ] + [(idx, 768) for idx in range(9, len(lengths))]:
        num_blocks = min(num_shared // 16, len(tables[idx]))
        tables[idx][:num_blocks] = tables[0][:num_blocks]
    together = replace(step, batch=replace(step.batch, block_ids=torch.cat(tables)))
    expected = []
    for idx, (query_len, seq_len) in enumerate(lengths):
        start = int(step.batch.query_start[idx])
        alone = Tables(
            query_start=starts([query_len]),
            seq_lens=torch.tensor([seq_len + 256], dtype=torch.int32),
            table_start=starts([len(tables[idx])]),
            block_ids=tables[idx],
        )
        expected.append(replace(step, q=step.q[start : start + query_len], batch=alone).attend())
    assert torch.equal(together.attend(), torch.cat(expected))
    # Every sequence the same one, as samples of one prompt are.
    same = Tables(
        query_start=starts([1] * 70),
        seq_lens=torch.full((70,), 800, dtype=torch.int32),
        table_start=starts([len(tables[0])] * 70),
        block_ids=tables[0].repeat(70),
    )
    equal = replace(step, q=step.q[:1].expand(70, -1, -1), batch=same).attend()
    first = replace(step, q=step.q[:1], batch=replace(same, **alone_first(tables[0]))).attend()
    assert torch.equal(equal, first.expand(70, -1, -1))


def alone_first(table: Tensor) -> dict[str, Tensor]:
    """The fields of a batch of one decode at position 799."""
    return {
        "query_start": starts([1]),
        "seq_lens": torch.tensor([800], dtype=torch.int32),
        "table_start": starts([len(table)]),
        "block_ids": table,
    }


def test_infinite_values_reach_only_who_sees_them() -> None:
    step = make_step([(40, 300)], dtype=torch.bfloat16)
    expected = step.attend()
    table = step.batch.block_ids.long()
    for value, position in ((float("inf"), 280), (float("nan"), 290)):
        step.value_cache[table[position // 16], :, position % 16] = value
    out = step.attend()
    assert torch.equal(out[:20], expected[:20])
    assert not out[20:].isfinite().any()


# Matrix tiles, for bfloat16, multiply sixteen keys of a block at a time.
@pytest.mark.parametrize(
    ("dtype", "block_sizes"),
    [(torch.float32, (1, 16, 256)), (torch.float16, (1, 8, 256)), (torch.bfloat16, (16, 32, 256))],
)
def test_bits_do_not_depend_on_the_block_size(dtype: torch.dtype, block_sizes: tuple[int, ...]) -> None:
    first, *others = [
        make_step([(1, 530), (300, 600)], block_size=block_size, dtype=dtype).attend()
        for block_size in block_sizes
    ]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("dtype", DTYPES)
def test_later_tokens_do_not_reach_earlier_ones(dtype: torch.dtype) -> None:
    step = make_step([(300, 300)], dtype=dtype)
    expected = step.attend()
    table = step.batch.block_ids.long()
    for position in (123, 299):
        for cache in (step.key_cache, step.value_cache):
            cache[table[position // 16], :, position % 16] = float("nan")
    out = step.attend()
    assert torch.equal(out[:123], expected[:123])
    assert out[123:].isnan().all()


def refused(step: Step, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step.attend()


def test_wrong_arguments_are_named() -> None:
    step = make_step([(1, 40), (2, 20)])
    bad_id = step.batch.block_ids.clone()
    bad_id[2] = len(step.key_cache)
    refused(
        replace(step, batch=replace(step.batch, block_ids=bad_id)), r"block_ids\[2\] is 9, allowed: 0 to 8"
    )
    too_long = torch.tensor([40, 50], dtype=torch.int32)
    refused(replace(step, batch=replace(step.batch, seq_lens=too_long)), r"seq_lens\[1\] is 50")
    refused(replace(step, q=step.q[:2]), r"query_start\[2\] is 3, allowed: 2")
    refused(replace(step, q=step.q[:, :5]), "num_heads is 5, allowed: a multiple of num_kv_heads = 2")
    refused(replace(step, q=step.q[..., :32]), r"shape of query is \[3, 6, 32\], allowed: \[3, 6, 64\]")
    refused(replace(step, q=step.q.double()), "dtype of q is torch.float64")
    refused(replace(step, q=step.q.to("meta")), "device of q is meta, allowed: cpu")
    refused(
        replace(step, q=step.q[..., ::2].repeat(1, 1, 4)[..., ::2]),
        "stride of the last dimension of query is 2",
    )
    refused(replace(step, value_cache=step.value_cache.half()), "dtype of value_cache is torch.float16")
    refused(replace(step, value_cache=step.value_cache[:3]), "shape of value_cache is")


def angle_tables(num_positions: int, rot: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(num_positions)[:, None] / 100.0 ** (torch.arange(rot // 2) / (rot // 2))
    return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What the transformers library computes, in float32."""
    rot = cos.shape[-1]
    x, rest = x[..., :rot].float(), x[..., rot:]
    partner = torch.cat((-x[..., rot // 2 :], x[..., : rot // 2]), dim=-1)
    return torch.cat(((x * cos[:, None] + partner * sin[:, None]).to(rest.dtype), rest), dim=-1)


@pytest.mark.parametrize("num_tokens", [0, 1, 37, 400])
@pytest.mark.parametrize(("head_dim", "rot"), [(64, 64), (80, 32), (6, 2), (128, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_cache_has_the_bits_of_torch(
    dtype: torch.dtype, head_dim: int, rot: int, num_tokens: int
) -> None:
    generator = torch.Generator().manual_seed(2)
    num_heads, num_kv_heads, block_size = 6, 2, 8
    # One wide projection, of which queries, keys and values are strided views.
    wide = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    q, k, v = wide.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = angle_tables(500, rot)
    positions = torch.randint(500, (num_tokens,), generator=generator)
    num_blocks = num_tokens // block_size + 3
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens]
    key_cache = torch.full((num_blocks, num_kv_heads, block_size, head_dim), 7.0, dtype=dtype)
    value_cache = key_cache.clone()
    expected_keys, expected_values = key_cache.clone(), value_cache.clone()
    expected_keys[slots // block_size, :, slots % block_size] = rotated(k, cos[positions], sin[positions])
    expected_values[slots // block_size, :, slots % block_size] = v

    out = cpu.rope_cache(q, k, v, cos, sin, positions.int(), key_cache, value_cache, slots.int())

    assert torch.equal(out, rotated(q, cos[positions], sin[positions]))
    assert torch.equal(key_cache, expected_keys)
    assert torch.equal(value_cache, expected_values)


def test_rope_cache_refuses_what_does_not_fit() -> None:
    rows = torch.zeros(2, 2, 8)
    caches = (torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8))
    cos, sin = angle_tables(10, 8)
    good = torch.tensor([0, 1], dtype=torch.int32)

    def call(
        positions: Tensor = good, slots: Tensor = good, angles: tuple[Tensor, Tensor] = (cos, sin)
    ) -> None:
        cpu.rope_cache(rows, rows, rows, *angles, positions, *caches, slots)

    call()
    with pytest.raises(ValueError, match=r"positions\[1\] is 10, allowed: 0 to 9"):
        call(positions=torch.tensor([0, 10], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"slot_mapping\[0\] is -1, allowed: 0 to 11"):
        call(slots=torch.tensor([-1, 3], dtype=torch.int32))
    with pytest.raises(ValueError, match="length of positions is 1, allowed: 2"):
        call(positions=good[:1])
    with pytest.raises(ValueError, match="width of cos is 10, allowed: an even number up to head_dim = 8"):
        call(angles=angle_tables(10, 10))
    with pytest.raises(ValueError, match=r"shape of sin is \[9, 8\], allowed: that of cos"):
        call(angles=(cos, sin[:9]))


def test_copy_blocks_reads_all_sources_first() -> None:
    layers = [(torch.randn(9, 2, 4, 8), torch.randn(9, 2, 4, 8)) for _ in range(3)]
    expected = [(keys.clone(), values.clone()) for keys, values in layers]
    for copies in ([], [[3, 5]], [[1, 2], [2, 3], [3, 1], [7, 8], [4, 4]]):
        pairs = torch.tensor(copies, dtype=torch.int32).view(-1, 2)
        source, destination = pairs.long().unbind(1)
        for cache in (cache for pair in expected for cache in pair):
            cache[destination] = cache[source]
        cpu.copy_blocks(layers, pairs)
        for got, wanted in zip(layers, expected, strict=True):
            assert torch.equal(got[0], wanted[0])
            assert torch.equal(got[1], wanted[1])


def test_copy_blocks_refuses_what_does_not_fit() -> None:
    layers = [(torch.zeros(4, 2, 4, 8), torch.zeros(4, 2, 4, 8))]
    with pytest.raises(ValueError, match=r"copies\[1\] is \[4, 1\], allowed: blocks 0 to 3"):
        cpu.copy_blocks(layers, torch.tensor([[1, 2], [4, 1]]))
    with pytest.raises(ValueError, match=r"copies\[1\] is \[3, 2\], allowed: destinations that no"):
        cpu.copy_blocks(layers, torch.tensor([[1, 2], [3, 2]]))
    with pytest.raises(ValueError, match="strides"):
        cpu.copy_blocks([(layers[0][0].mT, layers[0][1].mT)], torch.tensor([[1, 2]]))


def test_number_of_threads() -> None:
    _core.set_num_threads(3)
    assert _core.num_threads() == 3
    with pytest.raises(ValueError, match="num_threads is 0, allowed: 1 to 1024"):
        _core.set_num_threads(0)


def test_the_instruction_sets_are_chosen_among_those_that_are_there() -> None:
    names = ["amx_bf16", "avx512_bf16", "avx512", "avx2", "portable"]
    best = _core.cpu_isa()
    present = names[names.index(best) : -1]
    try:
        for name in present:
            _core.set_cpu_isa(name)
            assert _core.cpu_isa() == name
    finally:
        _core.set_cpu_isa("auto")
    assert _core.cpu_isa() == best
    for name in ("portable", "sse2", *names[: names.index(best)]):
        allowed = ", ".join(["auto", *present])
        with pytest.raises(ValueError, match=f"^cpu_isa is {name}, allowed: {allowed} on this processor$"):
            _core.set_cpu_isa(name)


def test_cpu_features() -> None:
    assert isinstance(_core.cpu_features(), list)
