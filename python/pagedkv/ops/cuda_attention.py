"""Paged attention on a GPU: the kernels for a step's work list, and the merge of what its items computed.

`pagedkv.ops.cuda` owns one `PagedAttention`. The runner has the work list of a step planned before the step's
words are copied to the device, so that both travel together (`pagedkv.stage`).
"""

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedkv.batch import StepBatch
from pagedkv.ops.cuda_kernels import (
    BULK_HEAD_DIMS,
    HEAD_DIMS,
    AttentionShape,
    Kernel,
    narrow_shape,
    row_kernel,
    wide_shape,
)
from pagedkv.ops.cuda_launch import FP8, Launcher, cache_params, check_heads, element_name, row_threads
from pagedkv.ops.cuda_plan import AttentionPlan, PlanOptions, plan_attention
from pagedkv.ops.cuda_work_list import WorkList, WorkListLayout

# The name in `StepBatch.prepared` of the step's work list, which all layers share.
WORK_LIST: Final = "cuda"


class PagedAttention:
    """The operation `paged_attention` by CUDA kernels, see `cuda/attention.cuh`."""

    def __init__(self, launch: Launcher, *, swizzled: bool, key_scale: float, value_scale: float) -> None:
        """See `pagedkv.ops.cuda.CudaOps`."""
        self._launch = launch
        self._swizzled = swizzled
        self._scales = (key_scale, value_scale)

    def options(self, q_shape: tuple[int, int], key_cache: Tensor) -> PlanOptions:
        """What plans depend on: query heads and head size, and a layer's cache."""
        num_heads, head_dim = q_shape
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim is {head_dim}, allowed: {', '.join(map(str, HEAD_DIMS))}")
        _, num_kv_heads, block_size, _ = key_cache.shape
        return PlanOptions(
            group_size=num_heads // num_kv_heads,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            wide_rows=wide_shape(head_dim).rows,
            narrow_rows=narrow_shape(head_dim, key_cache.element_size()).rows,
            capacity=self._launch.device.capacity,
        )

    def __call__(
        self, q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: StepBatch, scale: float
    ) -> Tensor:
        """See `pagedkv.ops.Ops.paged_attention`."""
        _, num_heads, head_dim = q.shape
        num_kv_heads = key_cache.shape[1]
        check_heads("q", q, head_dim)
        stored_bytes = self.stored_bytes(q, key_cache)
        work = self._work_list(batch, self.options((num_heads, head_dim), key_cache))
        layout = work.layout
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        parts = layout.num_part_rows * num_kv_heads
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
            **cache_params(key_cache, value_cache),
        }
        wide, narrow = wide_shape(head_dim), narrow_shape(head_dim, stored_bytes)
        for shape, begin, count in ((wide, 0, layout.num_wide), (narrow, layout.num_wide, layout.num_narrow)):
            kernel, num_threads, shared_bytes = self._kernel(shape, q, stored_bytes)
            items = work.items[begin:].data_ptr()
            self._launch(kernel, (count, num_kv_heads), num_threads, shared_bytes, items=items, **params)
        if parts:
            self._merge_parts(out, part_out, part_lse, work, num_kv_heads)
        return out

    def _kernel(self, shape: AttentionShape, q: Tensor, stored_bytes: int) -> tuple[Kernel, int, int]:
        """The kernel for items of a shape, its threads and its shared memory."""
        element, head_dim = element_name("q", q), q.shape[2]
        if self._swizzled and shape.row_warps == 1:
            kernel = shape.kernel("attention_bulk", element, head_dim, 2, swizzled=True)
            # One more warp asks for the copies.
            return kernel, shape.num_threads + 32, shape.bulk_shared_bytes(head_dim)
        name = "attention_fp8" if stored_bytes == 1 else "attention"
        kernel = shape.kernel(name, element, head_dim, stored_bytes, swizzled=self._swizzled)
        return kernel, shape.num_threads, shape.shared_bytes(head_dim, stored_bytes)

    def _merge_parts(
        self, out: Tensor, part_out: Tensor, part_lse: Tensor, work: WorkList, num_kv_heads: int
    ) -> None:
        """Joins the results of rows that several items have computed."""
        _, num_heads, head_dim = out.shape
        self._launch(
            row_kernel("merge_parts", element_name("q", out)),
            (work.layout.num_merge_rows, num_kv_heads),
            row_threads(4 * head_dim),
            0,
            out=out.data_ptr(),
            part_out=part_out.data_ptr(),
            part_lse=part_lse.data_ptr(),
            rows=work.merge_rows.data_ptr(),
            part_start=work.part_start.data_ptr(),
            part_rows=work.part_rows.data_ptr(),
            out_stride=out.stride(0),
            group_size=num_heads // num_kv_heads,
            head_dim=head_dim,
        )

    def stored_bytes(self, q: Tensor, cache: Tensor) -> int:
        """Bytes of a cached element. A cache holds the type of the queries, or fp8."""
        if self._swizzled:
            if cache.dtype != q.dtype or cache.shape[3] not in BULK_HEAD_DIMS:
                given = f"{cache.dtype} with heads of {cache.shape[3]}"
                allowed = f"{q.dtype} with heads of {', '.join(map(str, BULK_HEAD_DIMS))}"
                raise ValueError(f"a swizzled cache holds {given}, allowed: {allowed}")
            if cache.stride(2) != cache.shape[3]:
                raise ValueError(f"slots of a swizzled cache are {cache.stride(2)} apart, allowed: no gaps")
        if cache.dtype not in (q.dtype, FP8):
            raise ValueError(f"dtype of the cache is {cache.dtype}, allowed: {q.dtype}, {FP8}")
        return cache.element_size()

    def _work_list(self, batch: StepBatch, options: PlanOptions) -> WorkList:
        """The list of this step. That of a step which nobody staged is made here, which may wait."""
        work: WorkList | None = batch.prepared.get(WORK_LIST)
        if work is None:
            plan = plan_batch(batch, options)
            layout = WorkListLayout.of(plan)
            words = np.empty(layout.num_words + len(plan.part_rows), dtype=np.int32)
            layout.pack(plan, words)
            words[layout.num_words :] = plan.part_rows
            placed = torch.from_numpy(words).to(batch.positions.device)
            work = batch.prepared[WORK_LIST] = layout.view(placed, placed[layout.num_words :])
        return work


def plan_batch(batch: StepBatch, options: PlanOptions) -> AttentionPlan:
    """Plans a step from its tensors. Where these lie on a device, it waits for them."""
    names = ("query_start", "seq_lens", "table_start", "block_ids")
    return plan_sections({name: getattr(batch, name).cpu().numpy() for name in names}, options)


def plan_sections(sections: Mapping[str, NDArray[np.int32]], options: PlanOptions) -> AttentionPlan:
    """Plans a step from the sections of its arena."""
    return plan_attention(
        sections["query_start"], sections["seq_lens"], sections["table_start"], sections["block_ids"], options
    )
