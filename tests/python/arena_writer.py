"""Writes steps in the layout of the arena, and gives out blocks: tests run a model without the Rust core."""

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pagedkv.batch import StepBatch
from pagedkv.kv_cache import KVCache
from pagedkv.models import LoadedModel
from pagedkv.ops import Ops


def float_bits(value: float) -> int:
    """The bits of a float32 as a signed word."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return int(bits)


def signed(word: int) -> int:
    """The low 32 bits of a number as a signed word."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def sampling_words(
    temperature: float = 0.0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    sample_index: int = 0,
    position: int = 0,
    num_logprobs: int = -1,
) -> list[int]:
    """One row of the section of sampling parameters."""
    floats = [float_bits(value) for value in (temperature, top_p, min_p)]
    return [*floats, top_k, signed(seed), signed(seed >> 32), sample_index, position, num_logprobs]


def write_arena(sections: Sequence[Sequence[int]]) -> Tensor:
    """An arena of version 1 holding the sections, in order."""
    directory, data = [], []
    start = 2 + 2 * len(sections)
    for section in sections:
        directory += [start + len(data), len(section)]
        data += section
    return torch.tensor([1, len(sections), *directory, *data], dtype=torch.int32)


@dataclass
class TestSequence:
    """Token ids of one sequence, the blocks it owns, and how many of its tokens have been computed."""

    __test__ = False

    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0


class PagedRun:
    """A model with a poisoned cache, and blocks given out in random order."""

    def __init__(
        self, loaded: LoadedModel, ops: Ops, *, block_size: int, num_blocks: int, seed: int = 0
    ) -> None:
        config = loaded.config
        self.model, self.ops, self.block_size = loaded.model, ops, block_size
        self.model.pack(ops)
        self.model.set_max_len(config.max_len, loaded.device)
        self.kv_cache = KVCache(
            config.num_layers,
            num_blocks,
            config.num_kv_heads,
            block_size,
            config.head_dim,
            loaded.dtype,
            loaded.device,
            poison=True,
        )
        self.free = list(range(1, num_blocks + 1))
        random.Random(seed).shuffle(self.free)

    def batch(self, chunks: Sequence[tuple[TestSequence, int]]) -> StepBatch:
        """The step that computes the next `n` tokens of each sequence; every token's logits are wanted."""
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_start, table_start, block_ids, seq_lens = [0], [0], [], []
        for sequence, num_tokens in chunks:
            end = sequence.num_computed + num_tokens
            while len(sequence.blocks) * self.block_size < end:
                sequence.blocks.append(self.free.pop())
            for position in range(sequence.num_computed, end):
                token_ids.append(sequence.token_ids[position])
                positions.append(position)
                block = sequence.blocks[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
            block_ids += sequence.blocks
            query_start.append(len(token_ids))
            table_start.append(len(block_ids))
            seq_lens.append(end)
        rows = list(range(len(token_ids)))
        sections = [
            token_ids,
            [-1] * len(token_ids),
            positions,
            slots,
            query_start,
            seq_lens,
            table_start,
            block_ids,
            rows,
            [word for _ in rows for word in sampling_words()],
            [],
            [],
            [0, 0, 0, 0] * len(rows),
            [],
            [],
        ]
        return StepBatch.from_arena(write_arena(sections), sum(n == 1 for _, n in chunks))

    @torch.inference_mode()
    def step(self, chunks: Sequence[tuple[TestSequence, int]]) -> Tensor:
        """Computes the chunks and returns the f32 logits of all their tokens."""
        logits: Tensor = self.model(self.batch(chunks), self.kv_cache, self.ops)
        for sequence, num_tokens in chunks:
            sequence.num_computed += num_tokens
        return logits

    def logits(self, token_ids: Sequence[int], chunk: int) -> Tensor:
        """The logits at every position of a prompt that is computed `chunk` tokens at a time."""
        sequence = TestSequence(list(token_ids))
        parts = []
        while sequence.num_computed < len(token_ids):
            parts.append(self.step([(sequence, min(chunk, len(token_ids) - sequence.num_computed))]))
        self.free += sequence.blocks
        return torch.cat(parts)
