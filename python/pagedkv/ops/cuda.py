"""The operations on a GPU: packs parameters, picks kernels and launches them on torch's stream.

`pagedkv.ops.choose` makes one `CudaOps`. The kernels are those of `cuda/`; matrix products and
log-probabilities are torch's. Where the kernels run is up to the `Device`: `pagedkv.ops.cuda_device` is a
GPU, and the tests execute the same kernels on the CPU.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagedkv.batch import SamplingRows, StepBatch
from pagedkv.ops import reference
from pagedkv.ops.cuda_kernels import (
    BLOCK_SIZES,
    BULK_HEAD_DIMS,
    COPY_BLOCKS,
    HEAD_DIMS,
    SAMPLE,
    SAMPLE_SHARED_BYTES,
    SAMPLE_THREADS,
    AttentionShape,
    Kernel,
    ParamLayout,
    model_kernels,
    narrow_shape,
    norm_shared_bytes,
    rope_cache_kernel,
    row_kernel,
    wide_shape,
)
from pagedkv.ops.cuda_plan import AttentionPlan, PlanOptions, plan_attention
from pagedkv.ops.reference import PackedWeight


def on_gpu() -> "CudaOps":
    """The operations on torch's current GPU. Raises BackendUnavailable if the kernels cannot run on it."""
    from pagedkv.ops.cuda_device import Gpu

    return CudaOps(Gpu())


_ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "half"}
_FP8 = torch.float8_e4m3fn
_MAX_ROW_THREADS = 256
# In place of a token, see `cuda/sample.cu`: the row holds NaN.
_NOT_A_NUMBER = -1


class LoadedKernel(Protocol):
    """A kernel that is ready to be launched."""

    def launch(self, grid: tuple[int, int], num_threads: int, shared_bytes: int, params: bytearray) -> None:
        """Starts a grid of blocks with one packed struct of parameters, on torch's current stream."""


class Device(Protocol):
    """Where kernels run."""

    @property
    def capacity(self) -> int:
        """Blocks of an attention kernel that run at once."""

    @property
    def sources(self) -> Mapping[str, str]:
        """The sources that it compiles."""

    def load(self, kernel: Kernel) -> LoadedKernel:
        """Compiles and loads a kernel, or finds the one that was."""

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Loads several before they are needed."""


@dataclass(frozen=True)
class _PlacedPlan:
    """A plan with its arrays on the device, and room for the results of parts."""

    plan: AttentionPlan
    items: Tensor  # [N, 8]
    merge_rows: Tensor
    part_start: Tensor
    part_rows: Tensor


class CudaOps:
    """`pagedkv.ops.Ops` by CUDA kernels.

    Between calls it keeps nothing but loaded kernels; the plan of a step, which all layers share, is kept
    with its batch.
    """

    name = "cuda"

    def __init__(
        self,
        device: Device,
        *,
        swizzled: bool = False,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        """Makes the operations on a device.

        Args:
            device: Where they run.
            swizzled: Keep the cache's chunks in the order in which bulk copies bring them to the tensor cores
                without bank conflicts (`cuda/attention_bulk.cu`). It wants sm_90 or newer, 16-bit elements
                and a head size that is a multiple of 64. No other backend can read such a cache.
            key_scale: What an element 1 of an fp8 key cache stands for.
            value_scale: The same for values.
        """
        self._device = device
        self._swizzled = swizzled
        self._scales = (key_scale, value_scale)
        self._layouts: dict[str, ParamLayout] = {}

    def prepare(self, dtype: torch.dtype, head_dim: int) -> None:
        """Compiles and loads what a model needs, so that no step has to wait for it.

        Raises ValueError for a model that the kernels cannot compute.
        """
        if dtype not in _ELEMENTS:
            allowed = ", ".join(str(dtype) for dtype in _ELEMENTS)
            raise ValueError(f"dtype is {dtype}, allowed on a GPU: {allowed}")
        if head_dim not in (BULK_HEAD_DIMS if self._swizzled else HEAD_DIMS):
            raise ValueError(f"head_dim of the model is {head_dim}, allowed on a GPU: {HEAD_DIMS}")
        self._device.prepare(model_kernels(_ELEMENTS[dtype], head_dim, swizzled=self._swizzled))

    # ---- rows

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `pagedkv.ops.Ops.rms_norm`."""
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `pagedkv.ops.Ops.add_rms_norm`."""
        if residual.shape != x.shape or residual.dtype != x.dtype:
            given = f"{list(residual.shape)} of {residual.dtype}"
            raise ValueError(f"residual is {given}, allowed: {list(x.shape)} of {x.dtype}")
        _row_size("residual", residual)
        return self._norm(x, residual, weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        size = _row_size("x", x)
        threads = _row_threads(size)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._launch(
            row_kernel("add_rms_norm", _element("x", x)),
            (len(x), 1),
            threads,
            norm_shared_bytes(size, threads),
            out=out.data_ptr(),
            x=x.data_ptr(),
            residual=residual.data_ptr() if residual is not None else 0,
            weight=weight.data_ptr(),
            x_stride=x.stride(0),
            residual_stride=residual.stride(0) if residual is not None else 0,
            eps=eps,
            size=size,
        )
        return out

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `pagedkv.ops.Ops.silu_mul`."""
        size = _row_size("gate", gate)
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        threads = _row_threads(size)
        self._launch(
            row_kernel("silu_mul", _element("gate", gate)),
            (len(gate), -(-size // (8 * threads))),
            threads,
            0,
            out=out.data_ptr(),
            gate=gate.data_ptr(),
            up=up.data_ptr(),
            gate_stride=gate.stride(0),
            up_stride=up.stride(0),
            size=size,
        )
        return out

    # ---- matrices, which torch multiplies

    def pack_linear(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, gated: bool = False
    ) -> PackedWeight:
        """See `pagedkv.ops.Ops.pack_linear`."""
        return reference.pack_linear(weights, biases, gated=gated)

    def linear(self, x: Tensor, weight: PackedWeight, out_dtype: torch.dtype | None = None) -> Tensor:
        """See `pagedkv.ops.Ops.linear`."""
        out = torch.nn.functional.linear(x, weight.weight, weight.bias)
        if weight.gated:
            out = self.silu_mul(*out.chunk(2, dim=-1))
        return out if out_dtype is None else out.to(out_dtype)

    def embedding(self, token_ids: Tensor, weight: PackedWeight) -> Tensor:
        """See `pagedkv.ops.Ops.embedding`."""
        return reference.embedding(token_ids, weight)

    # ---- the cache

    def rope_cache(  # noqa: PLR0913 - the contract's signature
        self,
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
        """See `pagedkv.ops.Ops.rope_cache`. A slot of -1 writes nothing."""
        num_tokens, num_heads, head_dim = q.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        kernel = rope_cache_kernel(
            _element("q", q), self._stored_bytes(q, key_cache), swizzled=self._swizzled
        )
        for label, tensor in (("q", q), ("k", k), ("v", v)):
            _check_heads(label, tensor, head_dim)
        self._launch(
            kernel,
            (num_tokens, 1),
            128,
            0,
            query_out=out.data_ptr(),
            query=q.data_ptr(),
            key=k.data_ptr(),
            value=v.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            positions=positions.data_ptr(),
            slots=slot_mapping.data_ptr(),
            query_stride=q.stride(0),
            key_stride=k.stride(0),
            value_stride=v.stride(0),
            key_factor=1 / self._scales[0],
            value_factor=1 / self._scales[1],
            num_heads=num_heads,
            num_kv_heads=k.shape[1],
            head_dim=head_dim,
            **_cache_params(key_cache, value_cache),
        )
        return out

    def copy_blocks(self, kv_caches: Sequence[tuple[Tensor, Tensor]], copies: Tensor) -> None:
        """See `pagedkv.ops.Ops.copy_blocks`. No block may be both a source and a destination."""
        if len(copies) == 0 or len(kv_caches) == 0:
            return
        caches = [cache for pair in kv_caches for cache in pair]
        self._copy(caches, caches, copies)

    def swap_blocks(
        self,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        host_caches: Sequence[tuple[Tensor, Tensor]],
        pairs: Tensor,
        *,
        to_host: bool,
    ) -> None:
        """See `pagedkv.ops.Ops.swap_blocks`. The GPU reads and writes pinned memory where it lies."""
        if len(pairs) == 0 or len(kv_caches) == 0:
            return
        caches, host = ([cache for pair in side for cache in pair] for side in (kv_caches, host_caches))
        for cache in host:
            if cache.shape[1:] != caches[0].shape[1:] or cache.dtype != caches[0].dtype:
                given = f"{list(cache.shape)} of {cache.dtype}"
                allowed = f"blocks like {list(caches[0].shape)} of {caches[0].dtype}"
                raise ValueError(f"a cache of host memory is {given}, allowed: {allowed}")
        if to_host:
            self._copy(caches, host, pairs.contiguous())
        else:
            self._copy(host, caches, pairs.flip(1))

    def _copy(self, sources: Sequence[Tensor], destinations: Sequence[Tensor], copies: Tensor) -> None:
        """Copies blocks of each source to the destination at the same place: i32 [C, 2] on the GPU."""
        addresses = [cache.data_ptr() for caches in (sources, destinations) for cache in caches]
        placed = torch.tensor(addresses, dtype=torch.int64).to(copies.device)
        self._launch(
            COPY_BLOCKS,
            (len(copies), len(sources)),
            256,
            0,
            sources=placed.data_ptr(),
            destinations=placed[len(sources) :].data_ptr(),
            copies=copies.data_ptr(),
            block_bytes=sources[0].stride(0) * sources[0].element_size(),
        )

    def paged_attention(
        self, q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: StepBatch, scale: float
    ) -> Tensor:
        """See `pagedkv.ops.Ops.paged_attention`."""
        _, num_heads, head_dim = q.shape
        num_kv_heads = key_cache.shape[1]
        _check_heads("q", q, head_dim)
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim is {head_dim}, allowed: {', '.join(map(str, HEAD_DIMS))}")
        stored_bytes = self._stored_bytes(q, key_cache)
        narrow, wide = narrow_shape(head_dim, stored_bytes), wide_shape(head_dim)
        placed = self._plan(
            batch,
            PlanOptions(
                group_size=num_heads // num_kv_heads,
                num_kv_heads=num_kv_heads,
                block_size=key_cache.shape[2],
                wide_rows=wide.rows,
                narrow_rows=narrow.rows,
                capacity=self._device.capacity,
            ),
        )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        parts = placed.plan.num_part_rows * num_kv_heads
        part_out = torch.empty((parts, head_dim), dtype=torch.float32, device=q.device)
        part_lse = torch.empty(parts, dtype=torch.float32, device=q.device)
        key_scale, value_scale = self._scales if stored_bytes == 1 else (1.0, 1.0)
        params = {
            "out": out.data_ptr(),
            "part_out": part_out.data_ptr(),
            "part_lse": part_lse.data_ptr(),
            "query": q.data_ptr(),
            "table_start": batch.table_start.data_ptr(),
            "block_ids": batch.block_ids.data_ptr(),
            "positions": batch.positions.data_ptr(),
            "out_stride": out.stride(0),
            "query_stride": q.stride(0),
            "scale_log2": scale * key_scale * math.log2(math.e),
            "out_scale": value_scale,
            "group_size": num_heads // num_kv_heads,
            **_cache_params(key_cache, value_cache),
        }
        num_wide, num_items = placed.plan.num_wide, len(placed.plan.items)
        for shape, begin, end in ((wide, 0, num_wide), (narrow, num_wide, num_items)):
            kernel, num_threads, shared_bytes = self._attention_kernel(shape, q, stored_bytes)
            items = placed.items[begin:].data_ptr()
            self._launch(
                kernel, (end - begin, num_kv_heads), num_threads, shared_bytes, items=items, **params
            )
        if parts:
            self._merge_parts(out, part_out, part_lse, placed, num_kv_heads)
        return out

    def _attention_kernel(
        self, shape: AttentionShape, q: Tensor, stored_bytes: int
    ) -> tuple[Kernel, int, int]:
        """The kernel for items of a shape, its threads and its shared memory."""
        element, head_dim = _element("q", q), q.shape[2]
        if self._swizzled and shape.row_warps == 1:
            kernel = shape.kernel("attention_bulk", element, head_dim, 2, swizzled=True)
            # One more warp asks for the copies.
            return kernel, shape.num_threads + 32, shape.bulk_shared_bytes(head_dim)
        name = "attention_fp8" if stored_bytes == 1 else "attention"
        kernel = shape.kernel(name, element, head_dim, stored_bytes, swizzled=self._swizzled)
        return kernel, shape.num_threads, shape.shared_bytes(head_dim, stored_bytes)

    def _merge_parts(
        self, out: Tensor, part_out: Tensor, part_lse: Tensor, placed: _PlacedPlan, num_kv_heads: int
    ) -> None:
        """Joins the results of rows that several items have computed."""
        _, num_heads, head_dim = out.shape
        self._launch(
            row_kernel("merge_parts", _element("q", out)),
            (len(placed.plan.merge_rows), num_kv_heads),
            _row_threads(4 * head_dim),
            0,
            out=out.data_ptr(),
            part_out=part_out.data_ptr(),
            part_lse=part_lse.data_ptr(),
            rows=placed.merge_rows.data_ptr(),
            part_start=placed.part_start.data_ptr(),
            part_rows=placed.part_rows.data_ptr(),
            out_stride=out.stride(0),
            group_size=num_heads // num_kv_heads,
            head_dim=head_dim,
        )

    def _stored_bytes(self, q: Tensor, cache: Tensor) -> int:
        """Bytes of a cached element. A cache holds the type of the queries, or fp8."""
        if self._swizzled:
            if cache.dtype != q.dtype or cache.shape[3] not in BULK_HEAD_DIMS:
                given = f"{cache.dtype} with heads of {cache.shape[3]}"
                allowed = f"{q.dtype} with heads of {', '.join(map(str, BULK_HEAD_DIMS))}"
                raise ValueError(f"a swizzled cache holds {given}, allowed: {allowed}")
            if cache.stride(2) != cache.shape[3]:
                raise ValueError(f"slots of a swizzled cache are {cache.stride(2)} apart, allowed: no gaps")
        if cache.dtype not in (q.dtype, _FP8):
            raise ValueError(f"dtype of the cache is {cache.dtype}, allowed: {q.dtype}, {_FP8}")
        return cache.element_size()

    def _plan(self, batch: StepBatch, options: PlanOptions) -> _PlacedPlan:
        """The plan of this step: made for its first layer, kept for the others."""
        placed: _PlacedPlan | None = batch.prepared.get(self.name)
        if placed is None:
            plan = plan_attention(
                batch.query_start.cpu().numpy(),
                batch.seq_lens.cpu().numpy(),
                batch.table_start.cpu().numpy(),
                batch.block_ids.cpu().numpy(),
                options,
            )
            arrays = (plan.items, plan.merge_rows, plan.part_start, plan.part_rows)
            # One copy to the device for all of them. The items come first, which are read 16 bytes at once.
            flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
            flat = flat.to(batch.query_start.device, non_blocking=True)
            items, *rest = torch.split(flat, [array.size for array in arrays])
            placed = _PlacedPlan(plan, items.view(-1, plan.items.shape[1]), *rest)
            batch.prepared[self.name] = placed
        return placed

    # ---- sampling

    def sample(self, logits: Tensor, sampling: SamplingRows) -> Tensor:
        """See `pagedkv.ops.Ops.sample`."""
        num_rows, vocab_size = logits.shape
        if logits.dtype != torch.float32 or logits.stride(1) != 1:
            given = f"{logits.dtype} with strides {logits.stride()}"
            raise ValueError(f"logits are {given}, allowed: torch.float32, rows without gaps")
        if len(sampling.words) != num_rows:
            raise ValueError(f"rows of sampling are {len(sampling.words)}, allowed: {num_rows}, as of logits")
        # The kernel reads the arena's words as they are.
        rows = sampling.words.contiguous().to(logits.device, non_blocking=True)
        tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        self._launch(
            SAMPLE,
            (num_rows, 1),
            SAMPLE_THREADS,
            SAMPLE_SHARED_BYTES,
            tokens=tokens.data_ptr(),
            logits=logits.data_ptr(),
            rows=rows.data_ptr(),
            logits_stride=logits.stride(0),
            vocab_size=vocab_size,
        )
        failed = torch.nonzero(tokens < 0)
        if len(failed):
            row = int(failed[0, 0])
            what = "NaN somewhere" if int(tokens[row]) == _NOT_A_NUMBER else "infinite at its largest"
            raise ValueError(f"row {row} of the logits is {what}, allowed: numbers")
        return tokens

    def logprobs(self, logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `pagedkv.ops.Ops.logprobs`."""
        return reference.logprobs(logits, chosen, k)

    def _launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int],
        num_threads: int,
        shared_bytes: int,
        **params: int | float,
    ) -> None:
        if 0 in grid:
            return
        layout = self._layouts.get(kernel.name)
        if layout is None:
            layout = self._layouts[kernel.name] = ParamLayout(kernel.name, self._device.sources)
        self._device.load(kernel).launch(grid, num_threads, shared_bytes, layout.pack(**params))


def _element(label: str, tensor: Tensor) -> str:
    """The kernels' name of the element type."""
    element = _ELEMENTS.get(tensor.dtype)
    if element is None:
        allowed = ", ".join(str(dtype) for dtype in _ELEMENTS)
        raise ValueError(f"dtype of {label} is {tensor.dtype}, allowed: {allowed}")
    return element


def _row_size(label: str, tensor: Tensor) -> int:
    """Elements of a row, which the kernels read 16 bytes at once."""
    size, stride = tensor.shape[1], tensor.stride(0)
    if size % 8 or stride % 8 or tensor.stride(1) != 1:
        raise ValueError(f"{label} has rows of {size} elements {stride} apart, allowed: multiples of 8")
    return size


def _row_threads(size: int) -> int:
    """Threads for a row of which each takes 8 elements at once."""
    return min(_MAX_ROW_THREADS, -(-size // 256) * 32)


def _check_heads(label: str, tensor: Tensor, head_dim: int) -> None:
    """Refuses rows of heads with gaps between them; tokens may have any distance."""
    if tensor.stride(2) != 1 or tensor.stride(1) != head_dim or tensor.stride(0) % 8 or head_dim % 16:
        given = f"shape {list(tensor.shape)} and strides {list(tensor.stride())}"
        raise ValueError(f"{label} has {given}, allowed: heads of a multiple of 16 elements, without gaps")


def _cache_params(key_cache: Tensor, value_cache: Tensor) -> dict[str, int]:
    """Addresses and strides of a layer's cache, as the kernels' parameters name them."""
    block_size = key_cache.shape[2]
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size is {block_size}, allowed: {', '.join(map(str, BLOCK_SIZES))}")
    if key_cache.stride() != value_cache.stride() or key_cache.stride(3) != 1:
        raise ValueError(f"strides of value_cache are {value_cache.stride()}, allowed: those of key_cache")
    return {
        "key_cache": key_cache.data_ptr(),
        "value_cache": value_cache.data_ptr(),
        "block_stride": key_cache.stride(0),
        "head_stride": key_cache.stride(1),
        "slot_stride": key_cache.stride(2),
        "block_size_log2": block_size.bit_length() - 1,
    }
