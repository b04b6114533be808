"""One step as tensors: views of the packed int32 array, the arena, that the Rust core writes.

`rust/sched/step.rs` defines the layout. Word 0 is the version, word 1 the number of sections, then come
(offset, length) in words for each section. Sections are found through that directory only, so a section may
be added without moving the others. The runner builds one `StepBatch` a step, which the model and the
operations read. The sections for the host, "rows" and "ended", say what the core's events say as well;
whoever drives a core alone reads them through `arena_section`.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = TypeVar("Words", Tensor, NDArray[np.int32])

ARENA_VERSION = 1
_SECTIONS = (
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
_COLUMNS = {"sampling": 9, "copies": 2, "rows": 4, "ended": 4, "beams": 2}
# Sections that `StepBatch` holds as they are. The rest is decoded, or stays on the host.
_TENSORS = set(_SECTIONS) - {"sampling", "swaps", "rows", "ended"}


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
                high, sample_index, position, num_logprobs.
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

    @staticmethod
    def from_arena(arena: Tensor, num_decodes: int, device: torch.device | str | None = None) -> "StepBatch":
        """Reads a step that `Core.schedule` wrote.

        Args:
            arena: int32 on the host. The views share its memory: it must stay unchanged as long as they live.
            num_decodes: From the step's header.
            device: Where the tensors shall be; one copy of the used part of the arena if it is not the host.

        Raises:
            ValueError: The arena is not of this version, or its directory does not fit its length.
        """
        directory = _directory(arena)
        end = max(offset + length for offset, length in directory.values())
        target = torch.device(device or "cpu")
        placed = arena[:end] if target.type == "cpu" else arena[:end].to(target, non_blocking=True)
        return StepBatch(
            **{name: _view(placed, directory, name) for name in _TENSORS},
            sampling=SamplingRows.from_words(_view(arena, directory, "sampling"), target),
            num_decodes=num_decodes,
        )


def arena_section(arena: Words, name: str) -> Words:
    """One section of an arena, without a copy; tables are [entries, columns].

    Raises ValueError if the arena is not of this version, or its directory does not fit its length.
    """
    return _view(arena, _directory(arena), name)


def _view(words: Words, directory: dict[str, tuple[int, int]], name: str) -> Words:
    offset, length = directory[name]
    flat = words[offset : offset + length]
    return flat.reshape(-1, _COLUMNS[name]) if name in _COLUMNS else flat


def _directory(arena: Tensor | NDArray[np.int32]) -> dict[str, tuple[int, int]]:
    """Offset and length of each section, checked against the arena."""
    version, num_sections = arena[:2].tolist()
    if version != ARENA_VERSION:
        raise ValueError(f"the arena has version {version}; this code reads version {ARENA_VERSION}")
    if num_sections < len(_SECTIONS):
        raise ValueError(f"the arena has {num_sections} sections; this code reads {len(_SECTIONS)}")
    words = arena[2 : 2 + 2 * len(_SECTIONS)].tolist()
    places = list(zip(words[0::2], words[1::2], strict=True))
    for name, (offset, length) in zip(_SECTIONS, places, strict=True):
        if offset < 0 or length < 0 or offset + length > len(arena):
            raise ValueError(f"section {name} is {length} words at {offset}; the arena has {len(arena)}")
    return dict(zip(_SECTIONS, places, strict=True))
