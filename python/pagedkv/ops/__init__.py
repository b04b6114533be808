"""The operations that a forward pass is made of: their contract, and the choice of who computes them.

`Ops` is the contract. `reference` (torch) says what is right, `cpu` (Rust) and `cuda` must agree with it. The
models call these functions, the runner picks the backend once with `choose`. A backend is a module or an
object; between calls it holds nothing that changes a result.

Letters in shapes: T tokens of the step, R rows to sample, H query heads, G key/value heads, D head_dim, V
vocabulary, P positions in the table of angles, NB blocks (the null block included), C copies. Shapes are
never padded. Nothing that an operation reads beyond what it needs may change its result: unused slots of the
cache may hold NaN.
"""

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Final, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedkv._core import Heartbeat
from pagedkv.batch import SamplingRows, StepBatch
from pagedkv.errors import BackendUnavailable
from pagedkv.ops.decoder import DecoderWeights

BACKENDS = ("reference", "cpu", "cuda")
CUPY_INSTALL: Final = "pip install cupy-cuda13x (or cupy-cuda12x, as torch is)"
"""How to get what loads the CUDA kernels: the extras cuda13 and cuda12 of an environment that is there."""


class PackedWeight(Protocol):
    """What `Ops.pack_linear` returns. Only the backend that packed it looks inside."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it holds."""


class Ops(Protocol):
    """What a backend offers. Tensors have rows (last dimensions) without gaps."""

    @property
    def name(self) -> str:
        """One of `BACKENDS`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x [N, I]` over the root mean square of each row, times `weight [I]`; the same dtype as x.

        The row is normalised in float32, rounded to the dtype of x, and only then multiplied by the weight.
        """

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds `x [N, I]` to `residual [N, I]`, in place, and returns `rms_norm` of the sum.

        The sum is rounded to the dtype, as if it had been stored and read again.
        """

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """`silu(gate) * up`, both [T, I]; silu is rounded to the dtype of gate before the product."""

    def pack_linear(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, gated: bool = False
    ) -> PackedWeight:
        """Prepares weights [out, in] that are multiplied with the same x, once, when a model is loaded.

        Their products lie side by side, in the order given. gated: there are two, and the result of `linear`
        is `silu(x @ first.T) * (x @ second.T)` instead. The tensors are copied where that pays; afterwards
        they may be dropped.
        """

    def linear(self, x: Tensor, weight: PackedWeight, out_dtype: torch.dtype | None = None) -> Tensor:
        """`x [T, in] @ weight [out, in].T + bias [out]`, summed in float32; of the dtype of x by default."""

    def embedding(self, token_ids: Tensor, weight: PackedWeight) -> Tensor:
        """Rows of a packed weight that is not gated: i32 or i64 [T] -> [T, in]."""

    def rope_cache(  # noqa: PLR0913 - the two halves of the cache and the table are inputs of one fused operation
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
        """Rotates q and k by their positions, writes k and v into the cache, returns the rotated q.

        Args:
            q: [T, H, D].
            k: [T, G, D].
            v: [T, G, D].
            cos: f32 [P, D]. Element i of a head is paired with i + D/2, and both columns hold the same angle.
            sin: f32 [P, D], likewise.
            positions: i32 [T], each < P.
            key_cache: [NB, G, block_size, D], written at the slots.
            value_cache: [NB, G, block_size, D], written at the slots.
            slot_mapping: i32 [T]: block_id * block_size + offset; no slot occurs twice.
        """

    def paged_attention(
        self, q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: StepBatch, scale: float
    ) -> Tensor:
        """Causal attention of q [T, H, D] over each sequence's own blocks; returns [T, H, D].

        A token at position p attends to positions 0..p of its sequence, found through the block table. Query
        head h reads key/value head h // (H / G). Scores and their softmax are float32 whatever the dtype.
        """

    def forward(
        self,
        model: DecoderWeights,
        batch: StepBatch,
        angles: tuple[Tensor, Tensor],
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        heartbeat: Heartbeat | None = None,
    ) -> Tensor:
        """A whole forward pass, see `pagedkv.ops.decoder.compose`: the f32 logits [R, V] of the sampled rows.

        Args:
            model: Its weights, packed by this backend.
            batch: The step. Its copies must have been done.
            angles: Cosines and sines as in `rope_cache`.
            kv_caches: Keys and values of each layer, as in `rope_cache`; those of the step are written.
            heartbeat: Beats before each layer.
        """

    def copy_blocks(self, kv_caches: Sequence[tuple[Tensor, Tensor]], copies: Tensor) -> None:
        """Copies whole blocks in every layer: copies i32 [C, 2] of (source, destination).

        All sources are read as they were before the call.
        """

    def swap_blocks(
        self,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        host_caches: Sequence[tuple[Tensor, Tensor]],
        pairs: Tensor,
        *,
        to_host: bool,
    ) -> None:
        """Copies whole blocks between the caches and host memory, in every layer.

        Args:
            kv_caches: The caches of the layers.
            host_caches: As many in ordinary memory, with blocks of the same shape; pinned if a GPU computes.
            pairs: i32 [W, 2] of (block of kv_caches, block of host_caches), where kv_caches are computed. No
                block is written twice.
            to_host: Whether host_caches are written; otherwise kv_caches are.
        """

    def sample(self, logits: Tensor, sampling: SamplingRows) -> Tensor:
        """Draws one token a row: logits f32 [R, V] -> i64 [R].

        Temperature 0 takes the largest logit. Otherwise the score of a token is its logit minus the largest
        one, divided by the temperature. The tokens are filtered by top_k, then top_p (the smallest set of
        most likely tokens whose mass, within top_k, reaches p), then min_p (relative to the most likely
        token); at least one token is kept. Of the kept ones the largest `score + noise` wins. Equal values
        rank by token id, the lowest first, everywhere. The noise is defined in `pagedkv.ops.philox`, and
        depends on nothing but seed, sample index, position and token id; the mass of a token in
        `pagedkv.ops.exact`. Every backend draws the same tokens from the same logits.

        A row that cannot be sampled costs the others nothing: in place of a token it gets `NOT_A_NUMBER` if
        it holds NaN, and `INFINITE` if its largest logit is infinite and it is not greedy.
        """

    def logprobs(self, logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log probabilities before temperature and filters: logits f32 [R, V], chosen i64 [R].

        Returns the chosen tokens' f32 [R], the k most likely ids i64 [R, k] and theirs f32 [R, k], best
        first. Those of a row that holds NaN, or is infinite at its largest, are NaN.
        """


# What `Ops.sample` gives in place of a token, as `cuda/sample.cu` and `rust/cpu/sample.rs` have it.
NOT_A_NUMBER: Final = -1
INFINITE: Final = -2


def unsampled(tokens: NDArray[np.int32]) -> ValueError | None:
    """Says of the first row that could not be sampled why, see `Ops.sample`; None if there is none."""
    # A list: numpy's reductions, whose code is in no cache after a forward pass, take three times as long.
    if min(tokens.tolist(), default=0) >= 0:
        return None
    row = int(np.flatnonzero(tokens < 0)[0])
    what = "NaN somewhere" if tokens[row] == NOT_A_NUMBER else "infinite at its largest"
    return ValueError(f"row {row} of the logits is {what}, allowed: numbers")


def choose(backend: str, device: torch.device | None = None, *, swizzled: bool = False) -> Ops:
    """Picks the backend: "cpu" or "cuda", by the type of the device, or "reference" for plain torch.

    Args:
        backend: One of `BACKENDS`.
        device: Which GPU, for "cuda"; the first one if None.
        swizzled: Of "cuda", see `pagedkv.ops.cuda.CudaOps`.

    Raises:
        BackendUnavailable: It cannot be used here; the message says why and what can.
    """
    if backend not in BACKENDS:
        raise BackendUnavailable(f"backend is {backend!r}, allowed: {', '.join(BACKENDS)}")
    if backend == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable('device "cuda" was asked for, but torch sees no GPU; use device="cpu"')
    if backend == "cuda" and not has_cuda_kernels():
        raise BackendUnavailable(
            f"there is a GPU, but no CuPy, which loads the CUDA kernels; {CUPY_INSTALL}, "
            'or use device="cpu" (on the command line: --device cpu)'
        )
    module = importlib.import_module(f"pagedkv.ops.{backend}")
    if backend == "cuda":
        return cast(Ops, module.on_gpu(device or torch.device("cuda:0"), swizzled=swizzled))
    return cast(Ops, module)


def has_cuda_kernels() -> bool:
    """Whether CuPy is installed, which loads the kernels."""
    return importlib.util.find_spec("cupy") is not None
