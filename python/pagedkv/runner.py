"""One step on tensors: copies of blocks, the forward pass, sampling, log-probabilities.

The runner owns the model, the cache tensors and the choice of operations. It takes the arena that the core
wrote and gives back numbers; it decides nothing. A step is launched, and asked for its result later.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv._core import StepHeader
from pagedkv.batch import StepBatch, arena_section
from pagedkv.candidates import likeliest
from pagedkv.events import RowLogprobs
from pagedkv.kv_cache import KVCache
from pagedkv.ops import Ops
from pagedkv.swap import HostSwap

if TYPE_CHECKING:
    from pagedkv.models import LoadedModel


@dataclass(slots=True)
class StepResult:
    """Sampled tokens [R] int32, and the log-probabilities that were asked for.

    `candidates`: of the rows of beams, token ids int32 [B, K] and their log-probabilities float32 [B, K].
    """

    tokens: NDArray[np.int32]
    logprobs: RowLogprobs | None
    candidates: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that was enqueued. It needs the arena no more."""

    known: StepResult

    def result(self) -> StepResult:
        """Waits for what was sampled. Raises whatever the device raises."""
        return self.known


class ModelRunner:
    """A model, its cache and the operations on them, on one device.

    Attributes:
        before_layer: called before each layer of a forward pass, to show that it goes on; it must be cheap.
    """

    def __init__(
        self,
        model: "LoadedModel",
        kv_cache: KVCache,
        ops: Ops,
        device: torch.device,
        swap: HostSwap | None = None,
    ) -> None:
        self.model = model.model
        self.kv_cache = kv_cache
        self.ops = ops
        self.swap = swap
        self.device = device
        self.before_layer: Callable[[], None] | None = None
        # Tokens of the step launched last, for the next one, which may be launched before they are known.
        self._sampled = torch.empty(0, dtype=torch.int64, device=device)

    def new_arena(self, num_words: int) -> NDArray[np.int32]:
        """An arena for the core to write into; pinned where a GPU is to copy from it."""
        pinned = self.device.type == "cuda"
        return torch.zeros(num_words, dtype=torch.int32, pin_memory=pinned).numpy()

    @torch.inference_mode()
    def launch(self, header: StepHeader, arena: NDArray[np.int32]) -> LaunchedStep:
        """Enqueues one step; on the CPU it has been computed when this returns.

        A token whose source is a row takes what that row of the step launched before has sampled. Raises
        whatever the model or the device raises, the latter perhaps for an earlier step.
        """
        batch = StepBatch.from_arena(torch.from_numpy(arena), header.num_decodes, self.device)
        if (arena_section(arena, "token_source") >= 0).any():
            batch = self._with_sampled(batch)
        return LaunchedStep(self._compute(header, batch))

    def _with_sampled(self, batch: StepBatch) -> StepBatch:
        source = batch.token_source
        sampled = self._sampled[source.clamp(min=0)].to(batch.token_ids.dtype)
        return replace(batch, token_ids=torch.where(source >= 0, sampled, batch.token_ids))

    def _compute(self, header: StepHeader, batch: StepBatch) -> StepResult:
        self._move_blocks(header, batch)
        logits = self.model(batch, self.kv_cache, self.ops, self.before_layer)
        if header.num_rows == 0:
            if self.device.type == "cuda":
                # Nothing is read back, but the arena may be written again only once it has been copied.
                torch.cuda.synchronize(self.device)
            return StepResult(np.empty(0, dtype=np.int32), None)
        if header.num_beam_rows == header.num_rows:
            # Rows of beams are ranked, not sampled; their tokens are not looked at.
            return StepResult(np.zeros(header.num_rows, np.int32), None, self._candidates(logits, batch))
        tokens = self.ops.sample(logits, batch.sampling)
        self._sampled = tokens
        logprobs = self._logprobs(logits, tokens, batch)
        candidates = self._candidates(logits, batch) if header.num_beam_rows else None
        return StepResult(tokens.to("cpu", torch.int32).numpy(), logprobs, candidates)

    def _move_blocks(self, header: StepHeader, batch: StepBatch) -> None:
        """Makes the copies, and the moves from and to the host, which surround them.

        All that comes first: a block that is written in this step may be the source of a copy or a move.
        """
        if self.swap is not None and header.num_swaps_out + header.num_swaps_in:
            self.swap.start(self.ops, batch.swaps, header.num_swaps_out)
        if header.num_copies:
            self.ops.copy_blocks(self.kv_cache.layers, batch.copies)
        if self.swap is not None and header.num_swaps_in:
            self.swap.finish(self.ops)

    def probe(self) -> None:
        """Raises if the device computes no more. A GPU that met an illegal access never does again."""
        if self.device.type == "cuda":
            torch.ones(8, device=self.device).sum().item()

    def _candidates(
        self, logits: torch.Tensor, batch: StepBatch
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        rows, wanted = batch.beams.unbind(1)
        if len(rows) < len(logits):
            logits = logits[rows.long()]
        ids, logprobs = likeliest(logits, int(wanted.max()))
        return ids.to("cpu", torch.int32).numpy(), logprobs.cpu().numpy()

    def _logprobs(self, logits: torch.Tensor, tokens: torch.Tensor, batch: StepBatch) -> RowLogprobs | None:
        most = batch.sampling.max_num_logprobs
        if most < 0:
            return None
        picked = torch.nonzero(batch.sampling.num_logprobs >= 0).squeeze(1)
        chosen, top_ids, top = self.ops.logprobs(logits[picked], tokens[picked], most)
        index = {row: entry for entry, row in enumerate(picked.tolist())}
        return RowLogprobs(index, chosen.tolist(), top_ids.tolist(), top.tolist())
