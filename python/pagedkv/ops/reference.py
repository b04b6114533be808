"""The operations in plain torch: slow, on any device, obviously right. The others are held against it."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from pagedkv._core import Heartbeat
from pagedkv.batch import SamplingRows, StepBatch
from pagedkv.ops import INFINITE, NOT_A_NUMBER
from pagedkv.ops.decoder import DecoderWeights, compose
from pagedkv.ops.exact import UNIT_MASS, mass
from pagedkv.ops.philox import gumbel_noise

if TYPE_CHECKING:
    from pagedkv.ops import Ops

name = "reference"
_THIS = cast("Ops", sys.modules[__name__])

# Queries are taken in tiles, so that the scores of a long prompt need no [T, T] matrix at once.
_QUERY_TILE = 256


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `pagedkv.ops.Ops.rms_norm`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `pagedkv.ops.Ops.add_rms_norm`."""
    residual += x
    return rms_norm(residual, weight, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See `pagedkv.ops.Ops.silu_mul`."""
    return torch.nn.functional.silu(gate) * up


@dataclass(frozen=True)
class PackedWeight:
    """Weights on top of each other, otherwise as they were."""

    weight: Tensor
    bias: Tensor | None
    gated: bool

    @property
    def num_bytes(self) -> int:
        """See `pagedkv.ops.PackedWeight.num_bytes`."""
        return self.weight.nbytes


def pack_linear(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, gated: bool = False
) -> PackedWeight:
    """See `pagedkv.ops.Ops.pack_linear`."""
    bias = None
    if any(part is not None for part in biases):
        pairs = zip(weights, biases, strict=True)
        bias = torch.cat([weight.new_zeros(len(weight)) if part is None else part for weight, part in pairs])
    return PackedWeight(weights[0] if len(weights) == 1 else torch.cat(list(weights)), bias, gated)


def linear(x: Tensor, weight: PackedWeight, out_dtype: torch.dtype | None = None) -> Tensor:
    """See `pagedkv.ops.Ops.linear`."""
    out = torch.nn.functional.linear(x, weight.weight, weight.bias)
    if weight.gated:
        out = silu_mul(*out.chunk(2, dim=-1))
    return out if out_dtype is None else out.to(out_dtype)


def embedding(token_ids: Tensor, weight: PackedWeight) -> Tensor:
    """See `pagedkv.ops.Ops.embedding`."""
    return torch.nn.functional.embedding(token_ids, weight.weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [T, heads, D] by the angles whose cosine and sine are given as [T, D]."""
    half = x.shape[-1] // 2
    partner = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None, :].to(x.dtype) + partner * sin[:, None, :].to(x.dtype)


def rope_cache(  # noqa: PLR0913 - the contract's signature
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """See `pagedkv.ops.Ops.rope_cache`."""
    cos, sin = cos[positions.long()], sin[positions.long()]
    slots = slot_mapping.long()
    block_size = key_cache.shape[2]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = rotate(k, cos, sin)
    value_cache[blocks, :, offsets] = v
    return rotate(q, cos, sin)


def paged_attention(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: StepBatch, scale: float
) -> Tensor:
    """See `pagedkv.ops.Ops.paged_attention`."""
    out = torch.empty_like(q)
    query_start, table_start = batch.query_start.tolist(), batch.table_start.tolist()
    for s, seq_len in enumerate(batch.seq_lens.tolist()):
        table = batch.block_ids[table_start[s] : table_start[s + 1]].long()
        keys, values = _gather(key_cache, table, seq_len), _gather(value_cache, table, seq_len)
        for start in range(query_start[s], query_start[s + 1], _QUERY_TILE):
            end = min(start + _QUERY_TILE, query_start[s + 1])
            out[start:end] = _attend(q[start:end], keys, values, batch.positions[start:end], scale)
    return out


def _gather(cache: Tensor, table: Tensor, seq_len: int) -> Tensor:
    """The first seq_len positions of a sequence as f32 [G, seq_len, D]."""
    _, num_kv_heads, _, head_dim = cache.shape
    return cache[table].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :seq_len].float()


def _attend(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float) -> Tensor:
    """Attention of q [N, H, D] at `positions` over keys and values [G, L, D]."""
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[0]
    # [G, H / G, N, D]: heads that share a key head lie together.
    grouped = q.float().view(num_queries, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    scores = torch.matmul(grouped, keys[:, None].transpose(2, 3)) * scale
    key_positions = torch.arange(keys.shape[1], device=q.device)
    future = key_positions[None, :] > positions[:, None]
    weights = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
    mixed = torch.matmul(weights, values[:, None])
    return mixed.permute(2, 0, 1, 3).reshape(num_queries, num_heads, head_dim).to(q.dtype)


def forward(
    model: DecoderWeights,
    batch: StepBatch,
    angles: tuple[Tensor, Tensor],
    kv_caches: Sequence[tuple[Tensor, Tensor]],
    heartbeat: Heartbeat | None = None,
) -> Tensor:
    """See `pagedkv.ops.Ops.forward`."""
    return compose(_THIS, model, batch, angles, kv_caches, heartbeat)


def copy_blocks(kv_caches: Sequence[tuple[Tensor, Tensor]], copies: Tensor) -> None:
    """See `pagedkv.ops.Ops.copy_blocks`."""
    if len(copies) == 0:
        return
    source, destination = copies.long().unbind(1)
    for key_cache, value_cache in kv_caches:
        # Indexing with a tensor copies the sources before any destination is written.
        key_cache[destination] = key_cache[source]
        value_cache[destination] = value_cache[source]


def swap_blocks(
    kv_caches: Sequence[tuple[Tensor, Tensor]],
    host_caches: Sequence[tuple[Tensor, Tensor]],
    pairs: Tensor,
    *,
    to_host: bool,
) -> None:
    """See `pagedkv.ops.Ops.swap_blocks`."""
    device_blocks, host_blocks = pairs.long().cpu().unbind(1)
    for layer, host_layer in zip(kv_caches, host_caches, strict=True):
        for cache, host_cache in zip(layer, host_layer, strict=True):
            if to_host:
                host_cache[host_blocks] = cache[device_blocks].to(host_cache.device)
            else:
                cache[device_blocks] = host_cache[host_blocks].to(cache.device)


def sample(logits: Tensor, sampling: SamplingRows) -> Tensor:
    """See `pagedkv.ops.Ops.sample`."""
    tokens = _argmax(logits)
    if sampling.all_greedy:
        return tokens
    rows = torch.nonzero(sampling.temperature > 0).squeeze(1)
    chosen = logits[rows]
    largest = chosen.amax(-1, keepdim=True)
    if not bool(largest.isfinite().all()):
        tokens[rows[largest.squeeze(1).isinf()]] = INFINITE
        rows = rows[largest.squeeze(1).isfinite()]
        chosen, largest = logits[rows], logits[rows].amax(-1, keepdim=True)
    # Subtracting the largest logit first changes no probability, and lets any temperature > 0 stay finite.
    # Adding zero makes one number of both zeros.
    scores = (chosen - largest) / sampling.temperature[rows, None] + 0.0
    if sampling.any_filter:
        kept = _kept(scores, sampling.top_k[rows], sampling.top_p[rows], sampling.min_p[rows])
        scores = scores.masked_fill(~kept, float("-inf"))
    noise = gumbel_noise(
        sampling.seed_low[rows],
        sampling.seed_high[rows],
        sampling.position[rows],
        sampling.sample_index[rows],
        logits.shape[1],
    )
    tokens[rows] = _argmax(scores + noise)
    return tokens


def _argmax(values: Tensor) -> Tensor:
    """Column of each row's largest value, the lowest one on ties, which torch.argmax does not promise.

    `NOT_A_NUMBER` for a row that holds NaN.
    """
    vocab_size = values.shape[1]
    columns = torch.arange(vocab_size, device=values.device)
    is_largest = values == values.amax(-1, keepdim=True)
    result = torch.where(is_largest, columns, vocab_size).amin(-1)
    # The largest one of a row with NaN is NaN, which equals nothing.
    return torch.where(result < vocab_size, result, NOT_A_NUMBER)


def _kept(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which tokens survive top_k, top_p and min_p, as bool [R, V]."""
    vocab_size = scores.shape[1]
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab_size, device=scores.device)[None, :]
    keep = rank < torch.where(top_k > 0, top_k, vocab_size)[:, None]
    masses = mass(ranked)
    within = torch.where(keep, masses, 0)
    target = (top_p.double() * within.sum(-1)).ceil().clamp(min=1)[:, None]
    # A token is kept while the mass of the better ones is short of the target.
    keep &= (within.cumsum(-1) - within < target) | (top_p[:, None] >= 1)
    keep &= masses >= (min_p.double() * UNIT_MASS).ceil().clamp(max=UNIT_MASS)[:, None]
    return torch.zeros_like(keep).scatter(1, order, keep)


def logprobs(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `pagedkv.ops.Ops.logprobs`."""
    values = torch.log_softmax(logits.float(), dim=-1)
    ranked, order = values.sort(dim=-1, descending=True, stable=True)
    return values.gather(1, chosen[:, None]).squeeze(1), order[:, :k], ranked[:, :k]
