"""One step as tensors: views of the packed int32 array, the arena, that the Rust core writes.

`rust/sched/step.rs` defines the layout. Word 0 is the version, word 1 the number of sections, then come
(offset, length) in words for each section. Sections are found through that directory only, so a section may
be added without moving the others. The runner builds one `StepBatch` a step; the model and the operations
read it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pagedkv.ops import SamplingRows

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
)
# Sections that are tables, with their number of columns.
_COLUMNS = {"sampling": 9, "copies": 2, "rows": 4, "ended": 4}


@dataclass(frozen=True)
class StepBatch:
    """What forward and sampling read: T tokens of S sequences, R rows to sample. int32 unless noted.

    Sequences with one scheduled token, the decodes, come first. `rows` and `ended` stay on the host.
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
    rows: Tensor  # [R, 4] on the host; request id low, high, sample_index, num_cached_tokens
    ended: Tensor  # [E, 4] on the host; request id low, high, sample_index, reason
    num_decodes: int
    max_query_len: int
    max_seq_len: int

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.seq_lens)

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.sample_rows)

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
        end = max(offset + length for offset, length in directory)
        target = torch.device(device or "cpu")
        placed = arena[:end] if target.type == "cpu" else arena[:end].to(target, non_blocking=True)

        def section(name: str, words: Tensor) -> Tensor:
            offset, length = directory[_SECTIONS.index(name)]
            flat = words[offset : offset + length]
            return flat.view(-1, _COLUMNS[name]) if name in _COLUMNS else flat

        query_start, seq_lens = section("query_start", arena), section("seq_lens", arena)
        query_lens = query_start[1:] - query_start[:-1]
        plain = set(_SECTIONS) - {"sampling", "swaps", "rows", "ended"}
        return StepBatch(
            **{name: section(name, placed) for name in plain},
            sampling=SamplingRows.from_words(section("sampling", arena), target),
            rows=section("rows", arena),
            ended=section("ended", arena),
            num_decodes=num_decodes,
            max_query_len=int(query_lens.max()) if len(query_lens) else 0,
            max_seq_len=int(seq_lens.max()) if len(seq_lens) else 0,
        )


def _directory(arena: Tensor) -> list[tuple[int, int]]:
    """Offset and length of each section, checked against the arena."""
    version, num_sections = arena[:2].tolist()
    if version != ARENA_VERSION:
        raise ValueError(f"the arena has version {version}; this code reads version {ARENA_VERSION}")
    if num_sections < len(_SECTIONS):
        raise ValueError(f"the arena has {num_sections} sections; this code reads {len(_SECTIONS)}")
    words = arena[2 : 2 + 2 * len(_SECTIONS)].tolist()
    directory = list(zip(words[0::2], words[1::2], strict=True))
    for name, (offset, length) in zip(_SECTIONS, directory, strict=True):
        if offset < 0 or length < 0 or offset + length > len(arena):
            raise ValueError(f"section {name} is {length} words at {offset}; the arena has {len(arena)}")
    return directory
