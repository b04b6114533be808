"""One step on tensors: copies of blocks, the forward pass, sampling, log-probabilities.

The runner owns the model, the cache tensors and the choice of operations. It takes the arena that the core
wrote and gives back numbers; it decides nothing. A step is launched, and asked for its result later: on a GPU
the host is free in between.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedkv._core import Heartbeat
from pagedkv.batch import StepBatch, arena_section
from pagedkv.candidates import likeliest
from pagedkv.decode_graphs import DecodeGraphs
from pagedkv.events import RowLogprobs
from pagedkv.kv_cache import KVCache
from pagedkv.ops import NOT_A_NUMBER, Ops
from pagedkv.stage import Fetched, HostStage, Stage
from pagedkv.swap import HostSwap

if TYPE_CHECKING:
    from pagedkv.models import LoadedModel


class StepCounts(Protocol):
    """What a launch reads of a `StepHeader`."""

    @property
    def num_tokens(self) -> int:
        """T."""

    @property
    def num_decodes(self) -> int:
        """Leading sequences that decode."""

    @property
    def num_rows(self) -> int:
        """R."""

    @property
    def num_copies(self) -> int:
        """C."""

    @property
    def num_swaps_out(self) -> int:
        """Blocks that move to host memory."""

    @property
    def num_swaps_in(self) -> int:
        """Blocks that come back."""

    @property
    def num_beam_rows(self) -> int:
        """B."""

    @property
    def num_followers(self) -> int:
        """Tokens that the step before samples."""

    @property
    def num_logprobs(self) -> int:
        """The most log-probabilities that a row asks for; -1 if none does."""


Compute = Callable[[], tuple[Tensor, Tensor | None]]
Candidates = tuple[NDArray[np.int32], NDArray[np.float32]]


@dataclass(slots=True)
class StepResult:
    """Sampled tokens [R] int32, and the log-probabilities that were asked for.

    A row that could not be sampled has a negative number, see `Ops.sample`; so has one of a beam that could
    not be ranked. `candidates`: of the rows of beams, token ids int32 [B, K] and their log-probabilities
    float32 [B, K].
    """

    tokens: NDArray[np.int32]
    logprobs: RowLogprobs | None
    candidates: Candidates | None = None


class LaunchedStep:
    """A step that was enqueued. It needs the arena no more."""

    def __init__(
        self,
        num_rows: int,
        stage: Stage,
        fetched: Fetched | None = None,
        *,
        rows_with_logprobs: list[int] | None = None,
        beams: tuple[NDArray[np.int32], Tensor, int] | None = None,
    ) -> None:
        """Keeps what the result is made of.

        Args:
            num_rows: R.
            stage: Where it is computed.
            fetched: Brings tokens [R] and, if `rows_with_logprobs`, what `Ops.logprobs` returned for them.
                None: nothing was sampled.
            rows_with_logprobs: Rows that asked for log-probabilities.
            beams: The rows of beams, their logits, and how many candidates each needs.
        """
        self._num_rows = num_rows
        self._stage = stage
        self._fetched = fetched
        self._rows_with_logprobs = rows_with_logprobs or []
        self._beams = beams

    def result(self) -> StepResult:
        """Waits for what was sampled. Raises whatever the device raises.

        A step without rows has nothing to wait for: what comes after it is enqueued behind it.
        """
        logprobs, candidates = None, None
        if self._fetched is None:
            tokens = np.zeros(self._num_rows, np.int32)
        else:
            sampled, *rest = self._fetched()
            tokens = sampled.numpy().astype(np.int32)
            if rest:
                index = {row: entry for entry, row in enumerate(self._rows_with_logprobs)}
                logprobs = RowLogprobs(index, *(values.tolist() for values in rest))
        if self._beams is not None:
            rows, logits, num_candidates = self._beams
            with self._stage.active():
                ids, values = likeliest(logits, num_candidates)
                candidates = (ids.to("cpu", torch.int32).numpy(), values.cpu().numpy())
            tokens[rows[np.isnan(candidates[1]).any(1)]] = NOT_A_NUMBER
        return StepResult(tokens, logprobs, candidates)


class ModelRunner:
    """A model, its cache and the operations on them, on one device.

    Attributes:
        heartbeat: beats before each layer of a forward pass, to show that it goes on.
        stage: where steps are computed.
    """

    def __init__(
        self,
        model: "LoadedModel",
        kv_cache: KVCache,
        ops: Ops,
        *,
        max_num_rows: int,
        stage: Stage | None = None,
        swap: HostSwap | None = None,
    ) -> None:
        """Puts them together.

        Args:
            model: The model.
            kv_cache: Its cache.
            ops: The operations, with which the model was packed.
            max_num_rows: Rows that a step may have.
            stage: Where steps are computed; the CPU if None.
            swap: Moves blocks between the cache and host memory; None if no step asks for that.
        """
        self.model = model.model
        self.kv_cache = kv_cache
        self.ops = ops
        self._swap = swap
        self.heartbeat = Heartbeat()
        self.stage = HostStage() if stage is None else stage
        self._graphs: DecodeGraphs | None = None
        # Tokens of the step launched last, for the next one, which may be launched before they are known.
        # With graphs they stay in one place, where these read them.
        self._sampled = torch.zeros(max_num_rows, dtype=torch.int64, device=self.stage.torch_device)

    def new_arena(self, num_words: int) -> NDArray[np.int32]:
        """An arena for the core to write into. It may be written again as soon as `launch` has returned."""
        return np.zeros(num_words, np.int32)

    @torch.inference_mode()
    def launch(self, header: StepCounts, arena: NDArray[np.int32]) -> LaunchedStep:
        """Enqueues one step; on the CPU it has been computed when this returns.

        A token whose source is a row takes what that row of the step launched before has sampled. Raises
        whatever the model or the device raises, the latter perhaps for an earlier step.
        """
        with self.stage.active():
            copies, compute = self._placed(header, arena)
            self._move_blocks(header, arena, copies)
            logits, tokens = compute()
            # Rows of beams are ranked, not sampled; where there are no others, nobody looks at tokens.
            return self._launched(
                header, arena, logits, tokens if header.num_rows > header.num_beam_rows else None
            )

    def _move_blocks(self, header: StepCounts, arena: NDArray[np.int32], copies: Tensor) -> None:
        """Makes the copies, and the moves from and to host memory, which surround them.

        All that comes first: a block that is written in this step may be the source of a copy or a move.
        """
        num_out, num_in = header.num_swaps_out, header.num_swaps_in
        if num_out + num_in:
            assert self._swap is not None, "a core without host memory moves nothing"
            swaps = arena_section(arena, "swaps")
            pairs = self.stage.send(torch.from_numpy(swaps[:, 1:].ravel())).view(-1, 2)
            self._swap.start(self.ops, pairs[:num_out], pairs[num_out:])
        if header.num_copies:
            self.ops.copy_blocks(self.kv_cache.layers, copies)
        if self._swap is not None:
            self._swap.finish(self.ops)

    def probe(self) -> None:
        """Raises if the device computes no more. A GPU that met an illegal access never does again."""
        with self.stage.active():
            self.stage.probe()

    def make_ready(self, num_used: int) -> bool:
        """See `KVCache.make_ready`."""
        return self.kv_cache.make_ready(num_used)

    def capture_graphs(self, graphs: DecodeGraphs, *, progress: bool = False) -> None:
        """Has steps in which all sequences decode replayed from graphs, which are captured now."""

        def compute(batch: StepBatch) -> tuple[Tensor, Tensor]:
            logits, tokens = self._compute(batch, follows=True, samples=True)
            assert tokens is not None
            return logits, tokens

        self._graphs = graphs
        try:
            with torch.inference_mode(), self.stage.active():
                graphs.capture(compute, progress=progress)
        except BaseException:
            self._graphs = None
            raise

    def _placed(self, header: StepCounts, arena: NDArray[np.int32]) -> tuple[Tensor, Compute]:
        """Sends a step to the device; returns the copies that come first, and what enqueues the rest."""
        if self._graphs is not None and header.num_tokens == header.num_decodes == header.num_rows:
            decode = self._graphs.place(arena, header.num_tokens)
            if decode is not None:
                return decode.copies, decode.replay
        batch = self.stage.place(arena, header.num_decodes)
        samples = header.num_rows > header.num_beam_rows
        follows = header.num_followers > 0
        return batch.copies, partial(self._compute, batch, follows=follows, samples=samples)

    def _compute(self, batch: StepBatch, *, follows: bool, samples: bool) -> tuple[Tensor, Tensor | None]:
        """From tokens to logits f32 [R, V] and sampled tokens i64 [R]."""
        if follows:
            source = batch.token_source
            # A row that could not be sampled is a negative number, which nobody has seen yet. The step must
            # find a token, or the failure would cost more than the request of that row.
            sampled = self._sampled[source.clamp(min=0)].clamp(min=0).to(batch.token_ids.dtype)
            batch = replace(batch, token_ids=torch.where(source >= 0, sampled, batch.token_ids))
        logits: Tensor = self.model(batch, self.kv_cache, self.ops, self.heartbeat)
        if not samples:
            return logits, None
        tokens = self.ops.sample(logits, batch.sampling)
        if self._graphs is None:
            self._sampled = tokens
        else:
            self._sampled[: len(tokens)].copy_(tokens)
        return logits, tokens

    def _launched(
        self,
        header: StepCounts,
        arena: NDArray[np.int32],
        logits: Tensor,
        tokens: Tensor | None,
    ) -> LaunchedStep:
        """Enqueues what comes after sampling, and the way back to the host."""
        beams, rows, fetched = None, [], None
        if header.num_beam_rows:
            beam_rows, wanted = arena_section(arena, "beams").T
            # A copy: logits that a graph has left are gone with the next step.
            beams = beam_rows.copy(), logits[self.stage.send(torch.tensor(beam_rows))], int(wanted.max())
        if tokens is not None:
            results = [tokens]
            if header.num_logprobs >= 0:
                rows = np.flatnonzero(arena_section(arena, "sampling")[:, -1] >= 0).tolist()
                picked = self.stage.send(torch.tensor(rows))
                chosen = tokens[picked].clamp(min=0)  # A row that could not be sampled has chosen no token.
                results += self.ops.logprobs(logits[picked], chosen, header.num_logprobs)
            fetched = self.stage.fetch(results)
        return LaunchedStep(header.num_rows, self.stage, fetched, rows_with_logprobs=rows, beams=beams)
