"""One step as tensors: views of the packed int32 array, the arena, that the Rust core writes.

`rust/sched/step.rs` defines the layout. Word 0 is the version, word 1 the number of sections, then come
(offset, length) in words for each section. Sections are found through that directory only, so a section may
be added without moving the others. The runner builds one `StepBatch` a step, which the model and the
operations read. The sections for the host, "rows" and "ended", say what the core's events say as well;
whoever drives a core alone reads them through `arena_section`.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = TypeVar("Words", Tensor, NDArray[np.int32])

ARENA_VERSION = 1
SECTIONS = (
    "token_ids",
    "token_source",
    "positions",
    "slot_mapping",
    "query_start",
    "seq_lens",
    "table_start",
    "block_ids",
    "sample_rows",
    "sampling",
    "copies",
    "swaps",
    "rows",
    "ended",
    "beams",
)
# Sections that are tables, with their number of columns.
TABLE_COLUMNS = {"sampling": 9, "copies": 2, "swaps": 3, "rows": 4, "ended": 4, "beams": 2}
# Sections that `StepBatch` holds as they are. The rest is decoded, or stays on the host.
_TENSORS = set(SECTIONS) - {"sampling", "swaps", "rows", "ended"}


class SamplingRows:
    """How each of R rows of logits is to be sampled.

    The kernels read the words as they are; what others read is decoded when it is first asked for. The flags
    are known on the host, so that a step of greedy rows costs no sorting and no wait for the device.
    """

    def __init__(self, words: Tensor, placed: Tensor | None = None) -> None:
        """Keeps the arena's section of sampling parameters.

        Args:
            words: i32 [R, 9] on the host: temperature, top_p and min_p as float32 bits, top_k, seed low, seed
                high, sample_index, position, num_logprobs.
            placed: The same on the device that samples, which the decoded tensors lie on; None if that is
                the host.
        """
        self.words = words
        self.placed = words if placed is None else placed

    @cached_property
    def temperature(self) -> Tensor:
        """f32 [R]; 0 is greedy."""
        return self._floats[:, 0]

    @cached_property
    def top_p(self) -> Tensor:
        """f32 [R]; 1 keeps all."""
        return self._floats[:, 1]

    @cached_property
    def min_p(self) -> Tensor:
        """f32 [R]; 0 keeps all."""
        return self._floats[:, 2]

    @cached_property
    def top_k(self) -> Tensor:
        """i64 [R]; 0 or less keeps all."""
        return self._integers[:, 0]

    @cached_property
    def seed_low(self) -> Tensor:
        """i64 [R], 0..2^32-1: Philox wants two unsigned words, the arena has two signed ones."""
        return self._integers[:, 1] & 0xFFFFFFFF

    @cached_property
    def seed_high(self) -> Tensor:
        """i64 [R], 0..2^32-1."""
        return self._integers[:, 2] & 0xFFFFFFFF

    @cached_property
    def sample_index(self) -> Tensor:
        """i64 [R]."""
        return self._integers[:, 3]

    @cached_property
    def position(self) -> Tensor:
        """i64 [R], the index that the sampled token will have in its sequence."""
        return self._integers[:, 4]

    @cached_property
    def num_logprobs(self) -> Tensor:
        """i64 [R]; -1 none, 0 only the sampled token's."""
        return self._integers[:, 5]

    @cached_property
    def all_greedy(self) -> bool:
        """Whether every row takes its largest logit."""
        return bool((self.words[:, 0] == 0).all())

    @cached_property
    def any_filter(self) -> bool:
        """Whether a row has top_k, top_p or min_p."""
        _, top_p, min_p = self.words[:, :3].view(torch.float32).unbind(1)
        return bool(((top_p < 1) | (min_p > 0) | (self.words[:, 3] > 0)).any())

    @cached_property
    def _floats(self) -> Tensor:
        return self.placed[:, :3].view(torch.float32)

    @cached_property
    def _integers(self) -> Tensor:
        return self.placed[:, 3:].to(torch.int64)


@dataclass(frozen=True)
class StepBatch:
    """What forward and sampling read: T tokens of S sequences, R rows to sample. int32 unless noted.

    Sequences with one scheduled token, the decodes, come first.
    """

    token_ids: Tensor  # [T]
    token_source: Tensor  # [T]; -1, or the row of the previous step whose sample is this token
    positions: Tensor  # [T]
    slot_mapping: Tensor  # [T]; block_id * block_size + offset
    query_start: Tensor  # [S + 1]; sequence s owns tokens query_start[s] .. query_start[s + 1]
    seq_lens: Tensor  # [S]; computed + scheduled tokens
    table_start: Tensor  # [S + 1]; the same for block_ids
    block_ids: Tensor  # [table_start[S]]; the block tables one after another
    sample_rows: Tensor  # [R]; index of the token whose logits are sampled; may repeat
    sampling: SamplingRows  # R rows
    copies: Tensor  # [C, 2]; (source, destination), to be done before anything is written
    beams: Tensor  # [B, 2]; (row that belongs to a beam, candidates wanted of it)
    num_decodes: int
    prepared: dict[str, Any] = field(default_factory=dict)  # what a backend made of the step, by its name

    @staticmethod
    def from_arena(arena: Tensor, num_decodes: int, placed: Tensor | None = None) -> "StepBatch":
        """Reads a step that `Core.schedule` wrote.

        Args:
            arena: int32 on the host. The views share its memory: it must stay unchanged as long as they live.
            num_decodes: From the step's header.
            placed: The words in use, see `used_words`, on the device where the tensors shall be; the host if
                None. Only the words of sampling are read on the host as well.

        Raises:
            ValueError: The arena is not of this version, or its directory does not fit its length.
        """
        directory = _directory(arena.numpy())
        words = arena if placed is None else placed
        tensors: dict[str, Any] = {name: _view(words, directory, name) for name in _TENSORS}
        placed_rows = None if placed is None else _view(placed, directory, "sampling")
        sampling = SamplingRows(_view(arena, directory, "sampling"), placed_rows)
        return StepBatch(**tensors, sampling=sampling, num_decodes=num_decodes)


def used_words(arena: Words) -> int:
    """Words of an arena up to the end of its last section.

    Raises ValueError if the arena is not of this version, or its directory does not fit its length.
    """
    return max(offset + length for offset, length in _directory(arena).values())


def arena_section(arena: Words, name: str) -> Words:
    """One section of an arena, without a copy; tables are [entries, columns].

    Raises ValueError if the arena is not of this version, or its directory does not fit its length.
    """
    return _view(arena, _directory(arena), name)


def section_table(arena: NDArray[np.int32]) -> dict[str, NDArray[np.int32]]:
    """All sections of an arena as they lie there, without columns. Raises ValueError as `arena_section`."""
    directory = _directory(arena)
    return {name: arena[offset : offset + length] for name, (offset, length) in directory.items()}


def _view(words: Words, directory: dict[str, tuple[int, int]], name: str) -> Words:
    offset, length = directory[name]
    flat = words[offset : offset + length]
    return flat.reshape(-1, TABLE_COLUMNS[name]) if name in TABLE_COLUMNS else flat


def _directory(arena: Tensor | NDArray[np.int32]) -> dict[str, tuple[int, int]]:
    """Offset and length of each section, checked against the arena."""
    version, num_sections = arena[:2].tolist()
    if version != ARENA_VERSION:
        raise ValueError(f"the arena has version {version}; this code reads version {ARENA_VERSION}")
    if num_sections < len(SECTIONS):
        raise ValueError(f"the arena has {num_sections} sections; this code reads {len(SECTIONS)}")
    words = arena[2 : 2 + 2 * len(SECTIONS)].tolist()
    places = list(zip(words[0::2], words[1::2], strict=True))
    for name, (offset, length) in zip(SECTIONS, places, strict=True):
        if offset < 0 or length < 0 or offset + length > len(arena):
            raise ValueError(f"section {name} is {length} words at {offset}; the arena has {len(arena)}")
    return dict(zip(SECTIONS, places, strict=True))
