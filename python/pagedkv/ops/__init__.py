"""The operations that a forward pass is made of: their contract, and the choice of who computes them.

`Ops` is the contract. `reference` (torch) says what is right, `cpu` (Rust) and `cuda` must agree with it. The
models call these functions, the runner picks the backend once with `choose`. A backend is a module or an
object; it holds no state between calls.

Letters in shapes: T tokens of the step, R rows to sample, H query heads, G key/value heads, D head_dim, V
vocabulary, P positions in the table of angles, NB blocks (the null block included), C copies. Shapes are
never padded. Nothing that an operation reads beyond what it needs may change its result: unused slots of the
cache may hold NaN.
"""

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from pagedkv.errors import BackendUnavailable

if TYPE_CHECKING:
    from pagedkv.batch import StepBatch

logger = logging.getLogger(__name__)

BACKENDS = ("reference", "cpu", "cuda")


@dataclass(frozen=True)
class SamplingRows:
    """How each row of logits is to be sampled; one entry a row, all on the device of the logits.

    The flags are known on the host, so that a step of greedy rows costs no sorting and no wait for the
    device.
    """

    temperature: Tensor  # f32 [R]; 0 is greedy
    top_p: Tensor  # f32 [R]; 1 keeps all
    min_p: Tensor  # f32 [R]; 0 keeps all
    top_k: Tensor  # i64 [R]; 0 or less keeps all
    seed_low: Tensor  # i64 [R], 0..2^32-1
    seed_high: Tensor  # i64 [R], 0..2^32-1
    sample_index: Tensor  # i64 [R]
    position: Tensor  # i64 [R], the index that the sampled token will have in its sequence
    num_logprobs: Tensor  # i64 [R]; -1 none, 0 only the sampled token's
    all_greedy: bool
    any_filter: bool
    max_num_logprobs: int

    @staticmethod
    def from_words(words: Tensor, device: torch.device | None = None) -> "SamplingRows":
        """Decodes the arena's section of sampling parameters.

        Args:
            words: i32 [R, 9] on the host: temperature, top_p and min_p as float32 bits, top_k, seed low, seed
                high,
                sample_index, position, num_logprobs.
            device: Where the result shall be; the host if None.
        """
        floats = words[:, :3].view(torch.float32)
        temperature, top_p, min_p = floats.unbind(1)
        top_k, num_logprobs = words[:, 3], words[:, 8]
        any_filter = bool(((top_p < 1) | (min_p > 0) | (top_k > 0)).any())
        device = device or words.device
        floats = floats.to(device)
        integers = words[:, 3:].to(device).to(torch.int64)
        # The seed is 64 bits in two signed words; Philox wants two unsigned ones.
        seeds = integers[:, 1:3] & 0xFFFFFFFF
        return SamplingRows(
            temperature=floats[:, 0],
            top_p=floats[:, 1],
            min_p=floats[:, 2],
            top_k=integers[:, 0],
            seed_low=seeds[:, 0],
            seed_high=seeds[:, 1],
            sample_index=integers[:, 3],
            position=integers[:, 4],
            num_logprobs=integers[:, 5],
            all_greedy=bool((temperature == 0).all()),
            any_filter=any_filter,
            max_num_logprobs=int(num_logprobs.max()) if len(words) else -1,
        )


class Ops(Protocol):
    """What a backend offers. Tensors have rows (last dimensions) without gaps."""

    @property
    def name(self) -> str:
        """One of `BACKENDS`."""

    @property
    def device_type(self) -> str:
        """The torch device type that the tensors must be on: "cpu" or "cuda"."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x [N, I]` over the root mean square of each row, times `weight [I]`; the same dtype as x.

        The row is normalised in float32, rounded to the dtype of x, and only then multiplied by the weight.
        """

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """`silu(gate) * up`, both [T, I]; silu is rounded to the dtype of gate before the product."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`x [T, in] @ weight [out, in].T + bias [out]`."""

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
        self, q: Tensor, key_cache: Tensor, value_cache: Tensor, batch: "StepBatch", scale: float
    ) -> Tensor:
        """Causal attention of q [T, H, D] over each sequence's own blocks; returns [T, H, D].

        A token at position p attends to positions 0..p of its sequence, found through the block table. Query
        head h reads key/value head h // (H / G). Scores and their softmax are float32 whatever the dtype.
        """

    def copy_blocks(self, kv_caches: Sequence[tuple[Tensor, Tensor]], copies: Tensor) -> None:
        """Copies whole blocks in every layer: copies i32 [C, 2] of (source, destination).

        All sources are read as they were before the call.
        """

    def sample(self, logits: Tensor, sampling: SamplingRows) -> Tensor:
        """Draws one token a row: logits f32 [R, V] -> i64 [R].

        Temperature 0 takes the largest logit. Otherwise the logits are divided by the temperature, filtered
        by top_k, then top_p (the smallest set of most likely tokens whose mass, within top_k, reaches p),
        then min_p (relative to the most likely token); at least one token is kept. Of the kept ones the
        largest `score + noise` wins. Equal values rank by token id, the lowest first, everywhere. The noise
        is defined in `pagedkv.ops.philox`, and depends on nothing but seed, sample index, position and token
        id.

        Raises ValueError when a row holds NaN.
        """

    def logprobs(self, logits: Tensor, chosen: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log probabilities before temperature and filters: logits f32 [R, V], chosen i64 [R].

        Returns the chosen tokens' f32 [R], the k most likely ids i64 [R, k] and theirs f32 [R, k], best
        first.
        """


def choose(device: str = "auto") -> Ops:
    """Picks the backend.

    Args:
        device: "auto" (the GPU if torch sees one, else the CPU), "cuda", "cpu", or "reference" for plain
        torch.

    Raises:
        BackendUnavailable: The device cannot be used; the message says why and what can.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        return _cuda()
    if device == "cpu":
        return _cpu()
    if device == "reference":
        return _load("reference")
    allowed = ", ".join(("auto", *BACKENDS))
    raise BackendUnavailable(f"device is {device!r}; allowed are {allowed}")


def _cuda() -> Ops:
    if not torch.cuda.is_available():
        raise BackendUnavailable('device "cuda" was asked for, but torch sees no GPU; use device="cpu"')
    try:
        return _load("cuda")
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            "there is a GPU, but this version of pagedkv has no CUDA kernels yet; "
            'use device="cpu" (on the command line: --device cpu)'
        ) from error


def _cpu() -> Ops:
    try:
        return _load("cpu")
    except ImportError as error:
        # The extension has not been built. The answers are the same.
        logger.warning(
            "the compiled CPU kernels are missing (%s); torch computes in their place, slower", error
        )
        return _load("reference")


def _load(name: str) -> Ops:
    return cast(Ops, importlib.import_module(f"pagedkv.ops.{name}"))
