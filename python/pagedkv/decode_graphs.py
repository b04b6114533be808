"""Steps in which all sequences decode, as graphs: one launch for what is ten kernels a layer otherwise.

A graph repeats the same kernels at the same addresses. So there is one for each of a set of batch sizes, and
the words of a step are laid out at fixed places of one buffer on the device, which all graphs read; a step
with fewer tokens is padded with tokens that write nothing (slot -1) and that no work item reads for. The
runner captures the graphs at start, and replays them.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from pagedkv.batch import TABLE_COLUMNS, SamplingRows, StepBatch, section_table
from pagedkv.ops.cuda_attention import WORK_LIST, plan_sections
from pagedkv.ops.cuda_plan import AttentionPlan, PlanOptions, empty_plan
from pagedkv.ops.cuda_work_list import WorkListLayout
from pagedkv.ops.device import Device, Graph
from pagedkv.stage import DeviceStage

Words = NDArray[np.int32]
# From a batch to its logits f32 [R, V] and its tokens i64 [R].
Compute = Callable[[StepBatch], tuple[Tensor, Tensor]]

# A larger step keeps a GPU busy for longer than it takes to launch its kernels one by one.
MAX_GRAPH_SIZE: Final = 512
# Up to here sizes are 8 apart, then 16: the padding is at most an eighth of what is computed anyway.
FINE_SIZES: Final = 128

# The sections of a step at fixed places: entries a token, entries more, and what padding holds.
_SECTIONS: Final = (
    ("token_ids", 1, 0, 0),
    ("token_source", 1, 0, -1),
    ("positions", 1, 0, 0),
    ("slot_mapping", 1, 0, -1),
    ("seq_lens", 1, 0, 0),
    ("sample_rows", 1, 0, 0),
    ("sampling", TABLE_COLUMNS["sampling"], 0, 0),
    ("query_start", 1, 1, None),
    ("table_start", 1, 1, None),
)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes that are captured, in order: any decode step up to the largest is padded to one."""
    most = min(max_num_seqs, MAX_GRAPH_SIZE)
    sizes = {1, 2, 4, *range(8, FINE_SIZES + 1, 8), *range(FINE_SIZES, most + 1, 16), most}
    return sorted(size for size in sizes if size <= most)


@dataclass(frozen=True)
class DecodeLayout:
    """Where the words of a decode step of up to `size` tokens lie in the buffer.

    What varies most in length has no fixed place, and follows the rest without gaps: rows of parts, then
    block tables, then copies. Kernels find the first two through starts that count from the tail's beginning.
    """

    size: int
    work: WorkListLayout
    num_table_words: int

    @cached_property
    def places(self) -> Mapping[str, slice]:
        """The words of each section, behind those of the work list."""
        places, begin = {}, self.work.num_words
        for name, per_token, more, _ in _SECTIONS:
            end = begin + per_token * self.size + more
            places[name] = slice(begin, end)
            begin = end
        return places

    @property
    def tail(self) -> int:
        """Where what has no fixed place begins."""
        return int(self.places["table_start"].stop)

    @property
    def num_words(self) -> int:
        """Words of the largest step."""
        return self.tail + self.work.num_part_rows + self.num_table_words + 2 * self.size

    def pack(self, sections: Mapping[str, Words], plan: AttentionPlan, words: Words) -> int:
        """Writes a step, padded to the size; returns how many words that took."""
        self.work.pack(plan, words[: self.work.num_words])
        for name, _, _, padding in _SECTIONS:
            given, place = sections[name], words[self.places[name]]
            place[: len(given)] = given
            # Sequences that are not there have no tokens and no blocks: they begin where the last one ends.
            place[len(given) :] = given[-1] if padding is None else padding
        words[self.places["table_start"]] += len(plan.part_rows)
        end = self.tail
        for given in (plan.part_rows, sections["block_ids"], sections["copies"]):
            words[end : end + len(given)] = given
            end += len(given)
        return end

    def batch(self, words: Tensor) -> StepBatch:
        """The step that is read from a buffer on the device, whatever is written there."""
        view: dict[str, Any] = {name: words[place] for name, place in self.places.items()}
        rows = view.pop("sampling").view(self.size, -1)
        tail, none = words[self.tail :], words[:0].view(0, 2)
        batch = StepBatch(
            **view,
            block_ids=tail,
            copies=none,
            beams=none,
            sampling=SamplingRows(rows),
            num_decodes=self.size,
        )
        batch.prepared[WORK_LIST] = self.work.view(words, tail)
        return batch


@dataclass(frozen=True)
class PlacedDecode:
    """A step that is on its way to the device: the copies of blocks that come first, then a replay."""

    graph: Graph
    copies: Tensor
    logits: Tensor
    tokens: Tensor

    def replay(self) -> tuple[Tensor, Tensor]:
        """Enqueues the step. Returns logits f32 [R, V] and tokens i64 [R], gone with the next replay."""
        self.graph.replay()
        return self.logits, self.tokens


class DecodeGraphs:
    """The graphs of a model, one for each size, the buffer that they read, and where results are left."""

    def __init__(
        self, stage: DeviceStage, device: Device, vocab_size: int, max_num_seqs: int, blocks_per_seq: int
    ) -> None:
        """Makes room for steps of up to `max_num_seqs` sequences with up to `blocks_per_seq` blocks each."""
        self._stage = stage
        self._device = device
        self._layouts = [
            decode_layout(size, stage.options, blocks_per_seq) for size in graph_sizes(max_num_seqs)
        ]
        num_words = max(layout.num_words for layout in self._layouts)
        largest, place = self._layouts[-1].size, device.torch_device
        self._words = torch.zeros(num_words, dtype=torch.int32, device=place)
        self._logits = torch.zeros((largest, vocab_size), dtype=torch.float32, device=place)
        self._tokens = torch.zeros(largest, dtype=torch.int64, device=place)
        self._graphs: list[Graph] = []

    def capture(self, compute: Compute, *, progress: bool = False) -> None:
        """Captures all of them, with a bar if wanted. Nothing may be in flight.

        `compute` must read what differs between steps from the batch alone.
        """
        # The largest first: what the others compute on the way fits into its memory.
        layouts = tqdm(
            self._layouts[::-1], desc="capturing CUDA graphs", unit="graph", disable=not progress, leave=False
        )
        self._graphs = [self._capture(layout, compute) for layout in layouts][::-1]

    def place(self, arena: Words, num_tokens: int) -> PlacedDecode | None:
        """Sends a step of `num_tokens` decodes, one row each, to the device in one copy.

        None: it is larger than all graphs, and nothing was done.
        """
        index = bisect_left(self._layouts, num_tokens, key=lambda layout: layout.size)
        if index == len(self._graphs):
            return None
        layout, graph = self._layouts[index], self._graphs[index]
        sections = section_table(arena)
        plan = plan_sections(sections, self._stage.options)
        end = layout.tail + sum(map(len, (plan.part_rows, sections["block_ids"], sections["copies"])))
        if not layout.work.holds(plan) or end > layout.num_words:
            return None
        layout.pack(sections, plan, self._stage.buffers.take(end))
        self._stage.buffers.send(end, self._words)
        copies = self._words[end - len(sections["copies"]) : end].view(-1, 2)
        return PlacedDecode(graph, copies, self._logits[:num_tokens], self._tokens[:num_tokens])

    def _capture(self, layout: DecodeLayout, compute: Compute) -> Graph:
        end = layout.tail
        layout.pack(NO_SECTIONS, empty_plan(), self._stage.buffers.take(end))
        self._stage.buffers.send(end, self._words)
        batch = layout.batch(self._words)

        def work() -> None:
            # Results of all graphs go to one place, so that none of them keeps memory of its own for them.
            logits, tokens = compute(batch)
            self._logits[: layout.size].copy_(logits)
            self._tokens[: layout.size].copy_(tokens)

        work()  # Libraries choose and load kernels when they are first asked for a shape.
        return self._device.capture(work)


def decode_layout(size: int, options: PlanOptions, blocks_per_seq: int) -> DecodeLayout:
    """Where a step of `size` tokens lies; tables have at most `blocks_per_seq` blocks."""
    return DecodeLayout(size, WorkListLayout.of_decodes(size, options), size * blocks_per_seq)


def _no_sections() -> Iterator[tuple[str, Words]]:
    """The sections of a step without tokens."""
    for name, _, more, _ in _SECTIONS:
        yield name, np.zeros(more, dtype=np.int32)
    yield "block_ids", np.zeros(0, dtype=np.int32)
    yield "copies", np.zeros(0, dtype=np.int32)


# A step with nothing to do, for a capture.
NO_SECTIONS: Final = dict(_no_sections())
