"""A work list in memory: where its arrays lie in a run of words, packed by the host and read by the kernels.

`pagedkv.ops.cuda_plan` makes the list. A step that is captured in a graph has a grid that never changes, so
its list has room for the most that such a step may need, and what is not used is marked: an item without
rows, and a row of -1 to merge, end their block at once.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagedkv.ops.cuda_plan import ITEM_WORDS, AttentionPlan, PlanOptions, most_tiles

Words = TypeVar("Words", Tensor, NDArray[np.int32])


@dataclass(frozen=True)
class WorkList:
    """The list on the device: what a launch of the attention kernels needs of it."""

    layout: "WorkListLayout"
    items: Tensor  # [wide + narrow, 8]
    merge_rows: Tensor
    part_start: Tensor
    part_rows: Tensor


@dataclass(frozen=True)
class WorkListLayout:
    """How many entries of each kind there is room for.

    Items, the rows to merge and their starts lie one after another in `num_words` words. The rows of parts,
    whose number varies most, lie in a tail behind whatever else has a fixed place.
    """

    num_wide: int
    num_narrow: int
    num_merge_rows: int
    num_part_rows: int

    @staticmethod
    def of(plan: AttentionPlan) -> "WorkListLayout":
        """Room for one plan, exactly."""
        num_narrow = len(plan.items) - plan.num_wide
        return WorkListLayout(plan.num_wide, num_narrow, len(plan.merge_rows), plan.num_part_rows)

    @staticmethod
    def of_decodes(num_tokens: int, options: PlanOptions) -> "WorkListLayout":
        """Room for every plan of a step in which up to `num_tokens` sequences decode."""
        num_wide, num_narrow = most_tiles(num_tokens, options)
        # Keys are divided only as far as there is room on the GPU for more tiles than there are.
        parallel = options.capacity // options.num_kv_heads
        num_narrow = max(num_wide + num_narrow, parallel) if num_narrow else 0
        num_wide = max(num_wide, parallel) if num_wide else 0
        num_rows = num_tokens * options.group_size
        part_rows = num_wide * options.wide_rows + num_narrow * min(options.narrow_rows, num_rows)
        return WorkListLayout(num_wide, num_narrow, num_rows, part_rows)

    @property
    def num_items(self) -> int:
        """Items of both kinds."""
        return self.num_wide + self.num_narrow

    @property
    def num_words(self) -> int:
        """Words of the arrays with a fixed place."""
        return ITEM_WORDS * self.num_items + 2 * self.num_merge_rows + 1

    def holds(self, plan: AttentionPlan) -> bool:
        """Whether there is room for a plan."""
        needed = WorkListLayout.of(plan)
        return (
            needed.num_wide <= self.num_wide
            and needed.num_narrow <= self.num_narrow
            and needed.num_merge_rows <= self.num_merge_rows
            and needed.num_part_rows <= self.num_part_rows
        )

    def pack(self, plan: AttentionPlan, words: NDArray[np.int32]) -> None:
        """Writes the arrays with a fixed place. `plan.part_rows` is for the beginning of the tail."""
        items = words[: ITEM_WORDS * self.num_items].reshape(-1, ITEM_WORDS)
        num_narrow = len(plan.items) - plan.num_wide
        items[: plan.num_wide] = plan.items[: plan.num_wide]
        items[plan.num_wide : self.num_wide] = 0
        items[self.num_wide : self.num_wide + num_narrow] = plan.items[plan.num_wide :]
        items[self.num_wide + num_narrow :] = 0
        rows, starts = self._merge(words)
        rows[: len(plan.merge_rows)] = plan.merge_rows
        rows[len(plan.merge_rows) :] = -1
        starts[: len(plan.part_start)] = plan.part_start
        starts[len(plan.part_start) :] = 0

    def view(self, words: Tensor, tail: Tensor) -> WorkList:
        """The list that `pack` wrote, once its words and the tail are on the device.

        `words` must begin at a multiple of 16 bytes.
        """
        rows, starts = self._merge(words)
        items = words[: ITEM_WORDS * self.num_items].view(-1, ITEM_WORDS)
        return WorkList(self, items, rows, starts, tail)

    def _merge(self, words: Words) -> tuple[Words, Words]:
        begin = ITEM_WORDS * self.num_items
        end = begin + self.num_merge_rows
        return words[begin:end], words[end : end + self.num_merge_rows + 1]
