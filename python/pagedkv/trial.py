"""The largest steps that an engine's options allow, written as the core would write them.

`gpu` has them computed at start, before there is a cache, to see how much memory they take: they read the
null block, and write nothing. No core writes them: it would take many steps until one has as many rows as
there may be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pagedkv.batch import ARENA_VERSION, SECTIONS, TABLE_COLUMNS
from pagedkv.plan import blocks_for


@dataclass(frozen=True)
class TrialStep:
    """A step of sequences that all begin with it.

    Attributes:
        lengths: tokens of each sequence.
        num_decodes: how many of them have a row each; the others are chunks of prompts.
        num_rows: rows to sample, of the last token where they are more than decodes. All ask for
            log-probabilities.
    """

    lengths: Sequence[int]
    num_decodes: int
    num_rows: int
    num_copies: int = 0
    num_swaps_out: int = 0
    num_swaps_in: int = 0
    num_beam_rows: int = 0
    num_followers: int = 0
    num_logprobs: int = 0

    @staticmethod
    def of_prompts(num_tokens: int, max_len: int, num_rows: int) -> "TrialStep":
        """Prompts of up to `max_len` tokens."""
        full, rest = divmod(num_tokens, max_len)
        return TrialStep([max_len] * full + [rest] * (rest > 0), 0, num_rows)

    @staticmethod
    def of_decodes(num_decodes: int) -> "TrialStep":
        """Sequences of one token each."""
        return TrialStep([1] * num_decodes, num_decodes, num_decodes)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)

    def arena(self, block_size: int) -> NDArray[np.int32]:
        """The step as `rust/sched/step.rs` lays it out."""
        blocks = [blocks_for(length, block_size) for length in self.lengths]
        last = self.num_tokens - 1
        # A temperature of 0, and the sampled token's log-probability.
        sampling = np.zeros((self.num_rows, TABLE_COLUMNS["sampling"]), dtype=np.int32)
        sections = dict.fromkeys(SECTIONS, np.zeros(0, dtype=np.int32)) | {
            "token_ids": np.zeros(self.num_tokens, dtype=np.int32),
            "token_source": np.full(self.num_tokens, -1, dtype=np.int32),
            "positions": np.concatenate([np.arange(length, dtype=np.int32) for length in self.lengths]),
            "slot_mapping": np.full(self.num_tokens, -1, dtype=np.int32),
            "query_start": _starts(self.lengths),
            "seq_lens": np.array(self.lengths, dtype=np.int32),
            "table_start": _starts(blocks),
            "block_ids": np.zeros(sum(blocks), dtype=np.int32),
            "sample_rows": np.minimum(np.arange(self.num_rows, dtype=np.int32), last),
            "sampling": sampling.ravel(),
        }
        begins = accumulate(map(len, sections.values()), initial=2 + 2 * len(sections))
        directory = [(begin, len(words)) for begin, words in zip(begins, sections.values(), strict=False)]
        head = np.array([ARENA_VERSION, len(sections), *np.ravel(directory)], dtype=np.int32)
        return np.concatenate([head, *sections.values()])


def _starts(lengths: Sequence[int]) -> NDArray[np.int32]:
    return np.array([0, *accumulate(lengths)], dtype=np.int32)
