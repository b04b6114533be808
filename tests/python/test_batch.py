"""The views of the arena, on the golden step that the Rust core writes in its own test, and on bad ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

from arena_writer import sampling_words, write_arena
from pagedkv.batch import SamplingRows, StepBatch, arena_section

GOLDEN = Path(__file__).parents[1] / "data" / "arena_v1.txt"


def golden() -> torch.Tensor:
    return torch.tensor([int(word) for word in GOLDEN.read_text().split()], dtype=torch.int32)


def test_the_golden_step_is_read_as_the_core_wrote_it() -> None:
    batch = StepBatch.from_arena(golden(), num_decodes=1)
    assert batch.num_decodes == 1
    assert batch.token_ids.tolist() == [23, 27, 4, 11, 18, 25, 2, 10, 17, 24, 1, 8]
    assert batch.token_source.tolist() == [-1] * 12
    assert batch.positions.tolist() == [5, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert batch.slot_mapping.tolist() == [9, 12, 13, 14, 15, 16, 17, 20, 21, 22, 23, 24]
    assert batch.query_start.tolist() == [0, 1, 7, 12]
    assert batch.seq_lens.tolist() == [6, 6, 5]
    assert batch.table_start.tolist() == [0, 2, 4, 6]
    assert batch.block_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert batch.sample_rows.tolist() == [0, 6, 6]
    assert batch.copies.shape == (0, 2)
    sampling = batch.sampling
    assert sampling.temperature.tolist() == [0.5, 0.0, 0.0]
    assert sampling.top_p.tolist() == pytest.approx([0.9, 1.0, 1.0])
    assert sampling.min_p.tolist() == pytest.approx([0.1, 0.0, 0.0])
    assert sampling.top_k.tolist() == [7, 0, 0]
    assert sampling.seed_low.tolist() == [5, 0, 0]
    assert sampling.seed_high.tolist() == [256, 0, 0]
    assert sampling.sample_index.tolist() == [0, 0, 1]
    assert sampling.position.tolist() == [6, 6, 6]
    assert sampling.num_logprobs.tolist() == [-1, 3, 3]
    assert not sampling.all_greedy
    assert sampling.any_filter


@pytest.mark.parametrize("arena", [golden(), golden().numpy()], ids=["torch", "numpy"])
def test_the_sections_for_the_host_are_tables(arena: Any) -> None:
    assert arena_section(arena, "rows").tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0]]
    assert arena_section(arena, "ended").tolist() == [[2, 0, 0, 3]]
    assert arena_section(arena, "seq_lens").tolist() == [6, 6, 5]
    assert isinstance(arena_section(arena, "ended"), type(arena))


def test_views_share_the_memory_of_the_arena() -> None:
    arena = golden()
    batch = StepBatch.from_arena(arena, num_decodes=1)
    arena[32] = 99
    assert batch.token_ids[0] == 99


def test_what_lies_behind_the_used_part_is_not_read() -> None:
    padded = torch.cat((golden(), torch.full((50,), -7, dtype=torch.int32)))
    assert StepBatch.from_arena(padded, 1).sample_rows.tolist() == [0, 6, 6]
    assert arena_section(padded, "ended").tolist() == [[2, 0, 0, 3]]


def test_a_section_that_is_not_known_is_no_obstacle() -> None:
    sections: list[list[int]] = [[] for _ in range(16)]
    sections[0], sections[15] = [3, 4], [1, 2, 3]
    assert StepBatch.from_arena(write_arena(sections), 0).token_ids.tolist() == [3, 4]


def test_another_version_is_refused() -> None:
    arena = golden()
    arena[0] = 2
    with pytest.raises(ValueError, match="version 2; this code reads version 1"):
        StepBatch.from_arena(arena, 1)


def test_a_missing_section_is_refused() -> None:
    with pytest.raises(ValueError, match="14 sections; this code reads 15"):
        StepBatch.from_arena(write_arena([[]] * 14), 0)


@pytest.mark.parametrize(("word", "value"), [(4, -1), (4, 100_000), (5, -1), (5, 100_000)])
def test_a_section_outside_the_arena_is_refused(word: int, value: int) -> None:
    arena = golden()
    arena[word] = value
    with pytest.raises(ValueError, match="section token_source is"):
        StepBatch.from_arena(arena, 1)


def test_seeds_use_all_their_64_bits() -> None:
    seed = 0xFEDCBA98_87654321
    rows = SamplingRows(torch.tensor([sampling_words(seed=seed)], dtype=torch.int32))
    assert rows.seed_low.tolist() == [0x87654321]
    assert rows.seed_high.tolist() == [0xFEDCBA98]


def test_no_rows_are_no_obstacle() -> None:
    rows = SamplingRows(torch.empty((0, 9), dtype=torch.int32))
    assert rows.all_greedy
    assert not rows.any_filter
