"""The operations on a GPU: packs parameters, picks kernels and launches them on torch's stream.

`pagedkv.ops.choose` makes one `CudaOps`. The kernels are those of `cuda/`; matrix products and
log-probabilities are torch's. Where the kernels run is up to the `Device`. No operation waits for it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagedkv.batch import SamplingRows, StepBatch
from pagedkv.ops import reference
from pagedkv.ops.cuda_attention import PagedAttention
from pagedkv.ops.cuda_kernels import (
    BULK_HEAD_DIMS,
    COPY_BLOCKS,
    HEAD_DIMS,
    SAMPLE,
    SAMPLE_SHARED_BYTES,
    SAMPLE_THREADS,
    model_kernels,
    norm_shared_bytes,
    rope_cache_kernel,
    row_kernel,
)
from pagedkv.ops.cuda_launch import (
    ELEMENT_NAMES,
    Launcher,
    cache_params,
    check_heads,
    element_name,
    row_size,
    row_threads,
)
from pagedkv.ops.device import Device
from pagedkv.ops.reference import PackedWeight


def on_gpu(device: torch.device, *, swizzled: bool = False) -> "CudaOps":
    """The operations on a GPU. Raises BackendUnavailable if the kernels cannot run on it."""
    from pagedkv.ops.cuda_device import Gpu

    return CudaOps(Gpu(device), swizzled=swizzled)


class CudaOps:
    """`pagedkv.ops.Ops` by CUDA kernels.

    Between calls it keeps loaded kernels and the addresses of the caches whose blocks it copied last; the
    work list of a step, which all layers share, is kept with its batch.

    Attributes:
        device: where they run.
        attention: `paged_attention` and what it needs planned.
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
        self.device = device
        self._launch = Launcher(device)
        self.attention = PagedAttention(
            self._launch, swizzled=swizzled, key_scale=key_scale, value_scale=value_scale
        )
        self._swizzled = swizzled
        self._scales = (key_scale, value_scale)
        self._addresses: tuple[list[int], Tensor] | None = None

    def prepare(self, dtype: torch.dtype, head_dim: int, stored: torch.dtype | None = None) -> None:
        """Compiles and loads what a model needs, so that no step has to wait for it.

        Args:
            dtype: Of its weights.
            head_dim: Elements of a head.
            stored: Of the cache; that of the weights if None.

        Raises ValueError for a model that the kernels cannot compute.
        """
        if dtype not in ELEMENT_NAMES:
            allowed = ", ".join(str(dtype) for dtype in ELEMENT_NAMES)
            raise ValueError(f"dtype is {dtype}, allowed on a GPU: {allowed}")
        if head_dim not in (BULK_HEAD_DIMS if self._swizzled else HEAD_DIMS):
            raise ValueError(f"head_dim of the model is {head_dim}, allowed on a GPU: {HEAD_DIMS}")
        stored_bytes = (stored or dtype).itemsize
        kernels = model_kernels(ELEMENT_NAMES[dtype], head_dim, stored_bytes, swizzled=self._swizzled)
        self.device.prepare(kernels)

    # ---- rows

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `pagedkv.ops.Ops.rms_norm`."""
        return self._norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `pagedkv.ops.Ops.add_rms_norm`."""
        if residual.shape != x.shape or residual.dtype != x.dtype:
            given = f"{list(residual.shape)} of {residual.dtype}"
            raise ValueError(f"residual is {given}, allowed: {list(x.shape)} of {x.dtype}")
        row_size("residual", residual)
        return self._norm(x, residual, weight, eps)

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        size = row_size("x", x)
        threads = row_threads(size)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._launch(
            row_kernel("add_rms_norm", element_name("x", x)),
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
        size = row_size("gate", gate)
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        threads = row_threads(size)
        self._launch(
            row_kernel("silu_mul", element_name("gate", gate)),
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
            element_name("q", q), self.attention.stored_bytes(q, key_cache), swizzled=self._swizzled
        )
        for label, tensor in (("q", q), ("k", k), ("v", v)):
            check_heads(label, tensor, head_dim)
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
            **cache_params(key_cache, value_cache),
        )
        return out

    def copy_blocks(self, kv_caches: Sequence[tuple[Tensor, Tensor]], copies: Tensor) -> None:
        """See `pagedkv.ops.Ops.copy_blocks`. No block may be both a source and a destination."""
        if len(copies) == 0 or len(kv_caches) == 0:
            return
        caches = [cache for pair in kv_caches for cache in pair]
        addresses = self._addresses_of(caches, copies.device)
        self._launch(
            COPY_BLOCKS,
            (len(copies), len(caches)),
            256,
            0,
            caches=addresses.data_ptr(),
            copies=copies.data_ptr(),
            block_bytes=caches[0].stride(0) * caches[0].element_size(),
        )

    def _addresses_of(self, caches: list[Tensor], device: torch.device) -> Tensor:
        """Addresses of caches as a tensor on the device. Copying them there waits, so they are kept."""
        pointers = [cache.data_ptr() for cache in caches]
        if self._addresses is None or self._addresses[0] != pointers:
            self._addresses = pointers, torch.tensor(pointers, dtype=torch.int64).to(device)
        return self._addresses[1]

    def paged_attention(
        self, q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: StepBatch, scale: float
    ) -> Tensor:
        """See `pagedkv.ops.Ops.paged_attention`."""
        return self.attention(q, key_cache, value_cache, batch, scale)

    # ---- sampling

    def sample(self, logits: Tensor, sampling: SamplingRows) -> Tensor:
        """See `pagedkv.ops.Ops.sample`. A row that cannot be sampled gives a negative number."""
        num_rows, vocab_size = logits.shape
        if logits.dtype != torch.float32 or logits.stride(1) != 1:
            given = f"{logits.dtype} with strides {logits.stride()}"
            raise ValueError(f"logits are {given}, allowed: torch.float32, rows without gaps")
        if len(sampling.words) != num_rows:
            raise ValueError(f"rows of sampling are {len(sampling.words)}, allowed: {num_rows}, as of logits")
        # The kernel reads the arena's words as they are.
        rows = sampling.placed
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
        return tokens

    def logprobs(self, logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `pagedkv.ops.Ops.logprobs`."""
        return reference.logprobs(logits, chosen, k)
