"""Steps with a paged cache and the same context as dense tensors, and what attention must give, in float64.

Tables are shuffled; each ends with an entry that must not be followed. Every slot without a token is NaN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedkv.batch import SamplingRows, StepBatch

WILD_BLOCK = 1 << 30
FP8 = torch.float8_e4m3fn


@dataclass
class PagedStep:
    q: Tensor  # [T, H, D]
    key_cache: Tensor
    value_cache: Tensor
    batch: StepBatch
    keys: list[Tensor]  # of each sequence, [length, KV heads, D]
    values: list[Tensor]
    key_scale: float
    value_scale: float

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def no_sampling() -> SamplingRows:
    return SamplingRows(torch.empty((0, 9), dtype=torch.int32))


def make_batch(lengths: list[tuple[int, int]], tables: list[Tensor], block_size: int) -> StepBatch:
    """A step of sequences given as (tokens in the step, tokens in the cache after it)."""
    positions = [torch.arange(seq_len - num_tokens, seq_len) for num_tokens, seq_len in lengths]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for table, position in zip(tables, positions, strict=True)
    ]
    return StepBatch(
        token_ids=torch.zeros(sum(num_tokens for num_tokens, _ in lengths), dtype=torch.int32),
        token_source=torch.zeros(0, dtype=torch.int32),
        positions=torch.cat(positions).int(),
        slot_mapping=torch.cat(slots).int(),
        query_start=starts([num_tokens for num_tokens, _ in lengths]),
        seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32),
        table_start=starts([len(table) for table in tables]),
        block_ids=torch.cat(tables).int(),
        sample_rows=torch.zeros(0, dtype=torch.int32),
        sampling=no_sampling(),
        copies=torch.zeros((0, 2), dtype=torch.int32),
        beams=torch.zeros((0, 2), dtype=torch.int32),
        num_decodes=sum(num_tokens == 1 for num_tokens, _ in lengths),
    )


def make_step(  # noqa: PLR0913 - each is one thing that a case varies
    lengths: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    fp8: bool = False,
    slots_first: bool = False,
    num_shared: int = 0,
    seed: int = 1,
) -> PagedStep:
    """Makes a step.

    `slots_first`: memory order is [block, slot, head]. `num_shared` tokens begin all sequences.
    """
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    shared_blocks = num_shared // block_size
    num_own = [-(-seq_len // block_size) - shared_blocks for _, seq_len in lengths]
    num_blocks = shared_blocks + sum(num_own) + 2
    shuffled = torch.randperm(num_blocks - 1, generator=generator) + 1
    own = shuffled[shared_blocks : shared_blocks + sum(num_own)].split(num_own)
    tables = [torch.cat((shuffled[:shared_blocks], blocks, torch.tensor([WILD_BLOCK]))) for blocks in own]

    stored = FP8 if fp8 else dtype
    key_scale, value_scale = (0.5, 0.25) if fp8 else (1.0, 1.0)
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    caches = [torch.full(shape, float("nan")).to(stored) for _ in range(2)]
    if slots_first:
        caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
    dense: list[list[Tensor]] = [[], []]
    for (_, seq_len), table in zip(lengths, tables, strict=True):
        position = torch.arange(seq_len)
        blocks, slots = table[position // block_size], position % block_size
        for side, cache in enumerate(caches):
            rows = torch.randn(seq_len, num_kv_heads, head_dim, generator=generator).to(stored)
            if dense[side]:
                rows.view(torch.uint8)[:num_shared] = dense[side][0].view(torch.uint8)[:num_shared]
            cache.view(torch.uint8)[blocks, :, slots] = rows.view(torch.uint8)
            dense[side].append(rows)
    q = torch.randn(sum(num for num, _ in lengths), num_heads, head_dim, generator=generator).to(dtype)
    batch = make_batch(lengths, tables, block_size)
    return PagedStep(q, *caches, batch, *dense, key_scale, value_scale)


def exact_attention(step: PagedStep) -> Tensor:
    """Attention in float64 over the dense context."""
    out = torch.empty(step.q.shape, dtype=torch.float64)
    query_start = step.batch.query_start.tolist()
    repeat = step.q.shape[1] // step.key_cache.shape[1]
    for s, (keys, values) in enumerate(zip(step.keys, step.values, strict=True)):
        q = step.q[query_start[s] : query_start[s + 1]].double()
        wide_keys = (keys.double() * step.key_scale).repeat_interleave(repeat, 1)
        wide_values = (values.double() * step.value_scale).repeat_interleave(repeat, 1)
        scores = torch.einsum("qhd,khd->hqk", q, wide_keys) * step.scale
        position = torch.arange(len(keys) - len(q), len(keys))
        future = torch.arange(len(keys)) > position[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        out[query_start[s] : query_start[s + 1]] = torch.einsum("hqk,khd->qhd", weights, wide_values)
    return out


def relative_error(given: Tensor, expected: Tensor) -> float:
    return float((given.double() - expected).norm() / expected.norm())


def swizzle(cache: Tensor) -> Tensor:
    """A cache with chunk c of 16 bytes of slot s at place c ^ (s & 7)."""
    chunks = cache.unflatten(3, (-1, 8))
    slots = torch.arange(cache.shape[2])[:, None]
    order = torch.arange(chunks.shape[3]) ^ (slots & 7)
    return chunks.take_along_dim(order[None, None, :, :, None], 3).flatten(3)
