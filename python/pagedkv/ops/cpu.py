"""The operations on tensors in ordinary memory, the hot ones through the Rust kernels (`rust/cpu`).

What the kernels do not compute is torch's, as in `reference`. `pagedkv.ops.choose` picks this module. A
kernel gets addresses, shapes and strides, so that views of a larger tensor need no copy; it checks what it
can (shapes, lengths, ids of blocks), and this module checks what an address does not say: device and type.

Results depend neither on the number of threads nor on the rest of the batch, see `rust/cpu/tile.rs`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from pagedkv import _core
from pagedkv._core import Heartbeat
from pagedkv.batch import SamplingRows, StepBatch
from pagedkv.ops import reference
from pagedkv.ops.decoder import DecoderWeights, compose

if TYPE_CHECKING:
    from pagedkv.ops import Ops

    Products = tuple[_core.PackedLinear, _core.PackedLinear, _core.PackedLinear, _core.PackedLinear]

__all__ = [
    "add_rms_norm",
    "copy_blocks",
    "embedding",
    "forward",
    "linear",
    "logprobs",
    "name",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rope_cache",
    "sample",
    "silu_mul",
    "swap_blocks",
]

name = "cpu"
_THIS = cast("Ops", sys.modules[__name__])

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_DTYPES = {dtype_name: dtype for dtype, dtype_name in _DTYPE_NAMES.items()}


# Where there are no vectors to program, torch multiplies; it promises no bits.
_PACKS = _core.cpu_isa() != "portable"


def pack_linear(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, gated: bool = False
) -> _core.PackedLinear | reference.PackedWeight:
    """See `pagedkv.ops.Ops.pack_linear`."""
    first = weights[0]
    dtype_name = _dtype_name("weights[0]", first)
    for idx, weight in enumerate(weights):
        if weight.dtype != first.dtype or weight.ndim != 2 or weight.shape[1] != first.shape[1]:
            given = f"{list(weight.shape)} of {weight.dtype}"
            raise ValueError(f"weights[{idx}] is {given}, allowed: [out, {first.shape[1]}] of {first.dtype}")
    if not _PACKS:
        return reference.pack_linear(weights, biases, gated=gated)
    dense = [weight if weight.stride(1) == 1 else weight.contiguous() for weight in weights]
    shifts = [None if bias is None else bias.to(first.dtype).contiguous() for bias in biases]
    parts = [
        (weight.data_ptr(), len(weight), weight.stride(0), 0 if bias is None else bias.data_ptr())
        for weight, bias in zip(dense, shifts, strict=True)
    ]
    return _core.PackedLinear(parts, first.shape[1], dtype_name, gated=gated)


def linear(
    x: Tensor, weight: _core.PackedLinear | reference.PackedWeight, out_dtype: torch.dtype | None = None
) -> Tensor:
    """See `pagedkv.ops.Ops.linear`. Its bits do not depend on the other rows of x."""
    if isinstance(weight, reference.PackedWeight):
        return reference.linear(x, weight, out_dtype)
    if out_dtype is None:
        out_dtype = x.dtype
    num_rows, width = x.shape
    row_stride, stride = x.stride()
    if stride != 1:
        x = x.contiguous()
        row_stride = width
    out = torch.empty((num_rows, weight.out_size), dtype=out_dtype)
    weight.multiply(
        (x.data_ptr(), num_rows, width, row_stride),
        _dtype_name("x", x),
        out.data_ptr(),
        _DTYPE_NAMES[out_dtype],
    )
    return out


def embedding(token_ids: Tensor, weight: _core.PackedLinear | reference.PackedWeight) -> Tensor:
    """See `pagedkv.ops.Ops.embedding`."""
    if isinstance(weight, reference.PackedWeight):
        return reference.embedding(token_ids, weight)
    token_ids = _int32(token_ids)
    out = torch.empty((len(token_ids), weight.in_size), dtype=_DTYPES[weight.dtype])
    weight.rows(_indices(token_ids), out.data_ptr())
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `pagedkv.ops.Ops.rms_norm`."""
    row_type, shape = _matrix_type("x", x), x.shape
    _check_weight(weight, x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_rows, width = shape
    _core.rms_norm(
        out.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        num_rows,
        width,
        x.stride(0),
        row_type,
        eps,
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `pagedkv.ops.Ops.add_rms_norm`."""
    _matrix_type("x", x)
    _check_like("residual", residual, x)
    _check_weight(weight, x)
    residual += x
    return rms_norm(residual, weight, eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See `pagedkv.ops.Ops.silu_mul`."""
    row_type = _matrix_type("gate", gate)
    _check_like("up", up, gate)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    num_rows, width = gate.shape
    _core.silu_mul(
        out.data_ptr(),
        gate.data_ptr(),
        up.data_ptr(),
        num_rows,
        width,
        gate.stride(0),
        up.stride(0),
        row_type,
    )
    return out


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
    """See `pagedkv.ops.Ops.rope_cache`.

    cos and sin may be narrower than a head, [P, rot]: then only the first rot elements are rotated.
    """
    row_type = _dtype_name("q", q)
    for label, tensor in (("k", k), ("v", v)):
        if tensor.dtype != q.dtype:
            raise ValueError(f"dtype of {label} is {tensor.dtype}, allowed: that of q, {q.dtype}")
    cache_type = _cache_dtype_name(key_cache, value_cache)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    positions, slot_mapping = _int32(positions), _int32(slot_mapping)
    _core.rope_cache(
        _tensor(out),
        _tensor(q),
        _tensor(k),
        _tensor(v),
        (_tensor(cos), _tensor(sin)),
        _indices(positions),
        _tensor(key_cache),
        _tensor(value_cache),
        _indices(slot_mapping),
        row_type,
        cache_type,
    )
    return out


def paged_attention(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: StepBatch, scale: float
) -> Tensor:
    """See `pagedkv.ops.Ops.paged_attention`."""
    row_type, cache_type = _dtype_name("q", q), _cache_dtype_name(key_cache, value_cache)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    plan: _core.StepPlan = batch.prepared.get(name) or _prepare(batch)
    plan.paged_attention(
        out.data_ptr(), _tensor(q), _tensor(key_cache), _tensor(value_cache), row_type, cache_type, scale
    )
    return out


def _prepare(batch: StepBatch) -> _core.StepPlan:
    """Makes the plan of a step, which all of its layers use."""
    sections = (batch.query_start, batch.seq_lens, batch.table_start, batch.block_ids)
    # Kept until the plan has copied them: `_int32` may have made new ones.
    held = [_int32(section) for section in sections]
    plan = _core.StepPlan(*map(_indices, held))
    batch.prepared[name] = plan
    return plan


@dataclass(frozen=True, slots=True)
class _Bound:
    """A model in Rust with its caches, and the tensors whose addresses it holds."""

    decoder: _core.Decoder
    vocab_size: int
    angles: tuple[Tensor, Tensor]
    kv_caches: Sequence[tuple[Tensor, Tensor]]
    held: list[Tensor]


def forward(
    model: DecoderWeights,
    batch: StepBatch,
    angles: tuple[Tensor, Tensor],
    kv_caches: Sequence[tuple[Tensor, Tensor]],
    heartbeat: Heartbeat | None = None,
) -> Tensor:
    """See `pagedkv.ops.Ops.forward`. One call into Rust."""
    if not _PACKS:
        return compose(_THIS, model, batch, angles, kv_caches, heartbeat)
    bound: _Bound | None = model.prepared.get(name)
    if bound is None or bound.kv_caches is not kv_caches or bound.angles is not angles:
        bound = model.prepared[name] = _bind(model, angles, kv_caches)
    plan: _core.StepPlan = batch.prepared.get(name) or _prepare(batch)
    token_ids, positions = _int32(batch.token_ids), _int32(batch.positions)
    slot_mapping, sample_rows = _int32(batch.slot_mapping), _int32(batch.sample_rows)
    logits = torch.empty((len(sample_rows), bound.vocab_size), dtype=torch.float32)
    bound.decoder.forward(
        plan,
        _indices(token_ids),
        _indices(positions),
        _indices(slot_mapping),
        _indices(sample_rows),
        logits.data_ptr(),
        heartbeat,
    )
    return logits


def _bind(
    model: DecoderWeights, angles: tuple[Tensor, Tensor], kv_caches: Sequence[tuple[Tensor, Tensor]]
) -> _Bound:
    """Looks up what stays where it is as long as the caches and the angles are the same ones."""
    head = cast(_core.PackedLinear, model.head)
    dtype, hidden_size = _DTYPES[head.dtype], head.in_size
    cos, sin = (table.float().contiguous() for table in angles)
    held = [cos, sin]

    def address(label: str, tensor: Tensor, *shape: int) -> int:
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or not tensor.is_cpu:
            given = f"{list(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            raise ValueError(f"{label} is {given}, allowed: dense, {list(shape)} of {dtype} on the CPU")
        held.append(tensor)
        return tensor.data_ptr()

    cache_type, layers = _cache_dtype_name(*kv_caches[0]), []
    for idx, (layer, cache) in enumerate(zip(model.layers, kv_caches, strict=True)):
        if _cache_dtype_name(*cache) != cache_type:
            raise ValueError(f"dtype of cache {idx} is {cache[0].dtype}, allowed: {cache_type}, as before")
        norms = [address("input_norm", layer.input_norm, hidden_size)]
        norms.append(address("post_norm", layer.post_norm, hidden_size))
        norms += [address("a head norm", norm, model.head_dim) for norm in layer.head_norms or ()]
        products = cast("Products", (layer.qkv, layer.out, layer.gate_up, layer.down))
        layers.append((products, norms, (_tensor(cache[0]), _tensor(cache[1]))))
    embedding = model.embedding
    decoder = _core.Decoder(
        layers,
        cache_type,
        0 if embedding is None else address("embedding", embedding, head.out_size, hidden_size),
        address("norm", model.norm, hidden_size),
        head,
        model.eps,
        model.num_heads,
        model.scale,
        (_tensor(cos), _tensor(sin)),
    )
    return _Bound(decoder, head.out_size, angles, kv_caches, held)


def copy_blocks(kv_caches: Sequence[tuple[Tensor, Tensor]], copies: Tensor) -> None:
    """See `pagedkv.ops.Ops.copy_blocks`. Blocks must be dense; all layers have blocks of the same size."""
    if len(copies) == 0 or len(kv_caches) == 0:
        return
    copies = _int32(copies)
    first = kv_caches[0][0]
    caches = _blocks(kv_caches, first)
    _core.copy_blocks(caches, first[0].numel() * first.element_size(), _indices(copies))


def swap_blocks(
    kv_caches: Sequence[tuple[Tensor, Tensor]],
    host_caches: Sequence[tuple[Tensor, Tensor]],
    pairs: Tensor,
    *,
    to_host: bool,
) -> None:
    """See `pagedkv.ops.Ops.swap_blocks`. Blocks must be dense; all layers have blocks of the same size."""
    if len(pairs) == 0 or len(kv_caches) == 0:
        return
    first = kv_caches[0][0]
    sources, destinations = _blocks(kv_caches, first), _blocks(host_caches, first)
    if not to_host:
        sources, destinations, pairs = destinations, sources, pairs.flip(1)
    pairs = _int32(pairs)
    _core.swap_blocks(sources, destinations, first[0].numel() * first.element_size(), _indices(pairs))


def _blocks(kv_caches: Sequence[tuple[Tensor, Tensor]], first: Tensor) -> list[tuple[int, int, int]]:
    """The caches as the kernels want them; refuses blocks that are not dense or not like those of `first`."""
    caches = [cache for pair in kv_caches for cache in pair]
    for cache in caches:
        _dtype_name("a cache", cache)
        if cache.shape[1:] != first.shape[1:] or cache.dtype != first.dtype:
            given = f"{list(cache.shape)} of {cache.dtype}"
            raise ValueError(f"a cache is {given}, allowed: blocks like {list(first.shape)} of {first.dtype}")
        if not cache[0].is_contiguous():
            raise ValueError(f"a block of a cache has strides {cache.stride()[1:]}, allowed: dense ones")
    item_bytes = first.element_size()
    return [(cache.data_ptr(), len(cache), cache.stride(0) * item_bytes) for cache in caches]


def sample(logits: Tensor, sampling: SamplingRows) -> Tensor:
    """See `pagedkv.ops.Ops.sample`."""
    _check_logits(logits)
    num_rows, vocab_size = logits.shape
    words = sampling.words
    if len(words) != num_rows or not words.is_contiguous():
        raise ValueError(f"rows of sampling are {len(words)}, allowed: {num_rows} dense ones, as of logits")
    tokens = torch.empty(num_rows, dtype=torch.int64)
    _core.sample(
        tokens.data_ptr(), logits.data_ptr(), words.data_ptr(), num_rows, vocab_size, logits.stride(0)
    )
    return tokens


def logprobs(logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `pagedkv.ops.Ops.logprobs`."""
    _check_logits(logits)
    num_rows, vocab_size = logits.shape
    if chosen.shape != (num_rows,) or chosen.dtype != torch.int64:
        given = f"{list(chosen.shape)} of {chosen.dtype}"
        raise ValueError(f"chosen is {given}, allowed: [{num_rows}] of torch.int64")
    chosen = chosen.contiguous()
    of_chosen, top_ids, top = _core.logprobs(
        logits.data_ptr(), chosen.data_ptr(), num_rows, vocab_size, logits.stride(0), k
    )
    width = min(k, vocab_size)
    return (
        torch.tensor(of_chosen, dtype=torch.float32),
        torch.tensor(top_ids, dtype=torch.int64).view(num_rows, width),
        torch.tensor(top, dtype=torch.float32).view(num_rows, width),
    )


def _check_logits(logits: Tensor) -> None:
    if logits.dtype != torch.float32:
        raise ValueError(f"dtype of logits is {logits.dtype}, allowed: torch.float32")
    _matrix_type("logits", logits)


def _matrix_type(label: str, tensor: Tensor) -> str:
    """The element type of a matrix with dense rows; refuses other tensors."""
    if tensor.dim() != 2 or (tensor.stride(1) != 1 and tensor.shape[1] > 1):
        given = f"{list(tensor.shape)} with strides {tensor.stride()}"
        raise ValueError(f"{label} is {given}, allowed: two dimensions, the last one dense")
    return _dtype_name(label, tensor)


def _check_like(label: str, tensor: Tensor, first: Tensor) -> None:
    """Refuses a matrix that is not of the shape and type of the first argument."""
    if tensor.shape != first.shape or tensor.dtype != first.dtype:
        given = f"{list(tensor.shape)} of {tensor.dtype}"
        raise ValueError(f"{label} is {given}, allowed: {list(first.shape)} of {first.dtype}")
    _matrix_type(label, tensor)


def _check_weight(weight: Tensor, x: Tensor) -> None:
    if weight.dtype != x.dtype or weight.shape != x.shape[1:] or not weight.is_contiguous():
        given = f"{list(weight.shape)} of {weight.dtype}"
        raise ValueError(f"weight is {given}, allowed: dense, {list(x.shape[1:])} of {x.dtype}")
    _dtype_name("weight", weight)


def _tensor(tensor: Tensor) -> tuple[int, Sequence[int], Sequence[int]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _indices(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _int32(tensor: Tensor) -> Tensor:
    """Dense int32 on the CPU; sections of the arena are returned as they are."""
    if tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.is_cpu:
        return tensor
    return tensor.to(device="cpu", dtype=torch.int32).contiguous()


def _dtype_name(label: str, tensor: Tensor) -> str:
    """The kernels' name of the element type. Also refuses tensors that lie elsewhere."""
    if not tensor.is_cpu:
        raise ValueError(f"device of {label} is {tensor.device}, allowed: cpu")
    dtype_name = _DTYPE_NAMES.get(tensor.dtype)
    if dtype_name is None:
        allowed = ", ".join(_DTYPE_NAMES.values())
        raise ValueError(f"dtype of {label} is {tensor.dtype}, allowed: {allowed}")
    return dtype_name


def _cache_dtype_name(key_cache: Tensor, value_cache: Tensor) -> str:
    if value_cache.dtype != key_cache.dtype:
        raise ValueError(
            f"dtype of value_cache is {value_cache.dtype}, allowed: that of key_cache, {key_cache.dtype}"
        )
    _dtype_name("value_cache", value_cache)
    return _dtype_name("key_cache", key_cache)
