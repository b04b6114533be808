"""The work list of a step's attention: which thread block reads which keys for which rows.

A pure function of the step's lengths and tables, computed on the host once a step and read by every layer. A
row here is a "packed" one: query head r % group_size of the group that shares a key/value head, of token
r // group_size. `cuda/attention.cuh` documents a work item, `cuda/merge_parts.cu` what joins their results.

- Rows of a sequence are cut into tiles, wide ones for prompts and narrow ones for decodes.
- Decodes that begin with the same blocks read these once: their rows, which lie together, form tiles of their
  own over the shared keys ("cascade": Ye et al., "Cascade Inference", flashinfer.ai, 2024).
- Where there are fewer tiles than the GPU has room for, their keys are divided into parts of about equal
  length (split-KV: Dao et al., "Flash-Decoding", 2023).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.signedinteger[Any]]

# Sharing pays when the keys that are not read again outweigh one more part to merge.
MIN_SHARED_TOKENS = 256
MIN_SHARED_SEQUENCES = 4
# Parts are multiples of this many keys, which whole tiles of every kernel fill.
PART_MULTIPLE = 128
# Below this a part is mostly overhead.
MIN_PART_TOKENS = 256
ITEM_WORDS = 8


@dataclass(frozen=True)
class PlanOptions:
    """What a plan depends on besides the step."""

    group_size: int  # query heads per key/value head
    num_kv_heads: int
    block_size: int
    wide_rows: int  # rows of a tile of each kind
    narrow_rows: int
    capacity: int  # thread blocks that the GPU runs at once


@dataclass(frozen=True)
class AttentionPlan:
    """The work list, wide tiles before narrow ones, and what is to be merged afterwards."""

    items: Ints  # [N, 8]: sequence, first_row, num_rows, kv_begin, kv_end, unmasked_end, part_row, 0
    num_wide: int
    merge_rows: Ints  # [M]: rows with several parts
    part_start: Ints  # [M + 1]: where each one's parts begin in part_rows
    part_rows: Ints
    num_part_rows: int  # results of parts that there must be room for


@dataclass(frozen=True)
class _Tiles:
    """Tiles as columns, before their keys are divided."""

    sequence: Ints
    first_row: Ints
    num_rows: Ints
    kv_begin: Ints
    kv_end: Ints
    unmasked_end: Ints
    is_wide: NDArray[np.bool_]
    is_part: NDArray[np.bool_]  # its rows have keys in other tiles too


@dataclass(frozen=True)
class SharedPrefix:
    """Adjacent decodes whose tables begin with the same blocks."""

    first_sequence: int
    num_sequences: int
    num_tokens: int  # a multiple of the block size


def plan_attention(
    query_start: Ints,
    seq_lens: Ints,
    table_start: Ints,
    block_ids: Ints,
    options: PlanOptions,
) -> AttentionPlan:
    """Plans a step.

    Args:
        query_start: [S + 1], as in the arena.
        seq_lens: [S].
        table_start: [S + 1].
        block_ids: [table_start[S]].
        options: Shapes of the model and of the kernels.
    """
    num_tokens = np.diff(query_start)
    prefixes = shared_prefixes(num_tokens, seq_lens, table_start, block_ids, options)
    kv_begin = np.zeros(len(seq_lens), dtype=np.int32)
    for prefix in prefixes:
        kv_begin[prefix.first_sequence : prefix.first_sequence + prefix.num_sequences] = prefix.num_tokens
    tiles = [_own_tiles(query_start, seq_lens, kv_begin, options)]
    tiles += [_prefix_tiles(prefix, query_start, options) for prefix in prefixes]
    return _divide(_concatenate(tiles), options)


def empty_plan() -> AttentionPlan:
    """The plan of a step without tokens."""
    none = np.zeros(0, dtype=np.int32)
    return AttentionPlan(none.reshape(0, ITEM_WORDS), 0, none, np.zeros(1, dtype=np.int32), none, 0)


def shared_prefixes(
    num_tokens: Ints, seq_lens: Ints, table_start: Ints, block_ids: Ints, options: PlanOptions
) -> list[SharedPrefix]:
    """Finds runs of decodes whose first blocks are the same ones."""
    decodes = int(np.argmax(num_tokens != 1)) if (num_tokens != 1).any() else len(num_tokens)
    # The key of the token itself is the last one; what lies before its block is complete.
    full_blocks = (seq_lens[:decodes] - 1) // options.block_size
    min_blocks = -(-MIN_SHARED_TOKENS // options.block_size)
    # Short ones get a number that no other has, so that a run ends there.
    first_blocks = np.where(
        full_blocks >= min_blocks, block_ids[table_start[:decodes]], -1 - np.arange(decodes)
    )
    found = []
    begin = 0
    for end in range(1, decodes + 1):
        if end < decodes and first_blocks[end] == first_blocks[begin]:
            continue
        shared = int(full_blocks[begin:end].min())
        if end - begin >= MIN_SHARED_SEQUENCES:
            columns = table_start[begin:end, None] + np.arange(shared)
            differs = (block_ids[columns] != block_ids[columns[:1]]).any(axis=0)
            shared = int(np.argmax(differs)) if differs.any() else shared
            if shared >= min_blocks:
                found.append(SharedPrefix(begin, end - begin, shared * options.block_size))
        begin = end
    return found


def most_tiles(num_decodes: int, options: PlanOptions) -> tuple[int, int]:
    """The most tiles, wide and narrow ones, of a step in which so many sequences decode.

    They are counted before their keys are divided, which makes at most as many of all of them as run at once.
    """
    num_rows = num_decodes * options.group_size
    has_wide_rows = options.group_size > 2 * options.narrow_rows
    own = num_decodes * -(
        -options.group_size // (options.wide_rows if has_wide_rows else options.narrow_rows)
    )
    num_prefixes = num_decodes // MIN_SHARED_SEQUENCES
    wide = num_rows // options.wide_rows + num_prefixes if num_prefixes else 0
    narrow = num_prefixes if MIN_SHARED_SEQUENCES * options.group_size <= options.narrow_rows else 0
    return (own + wide, narrow) if has_wide_rows else (wide, own + narrow)


def _own_tiles(query_start: Ints, seq_lens: Ints, kv_begin: Ints, options: PlanOptions) -> _Tiles:
    """The rows of every sequence in tiles, each with its keys from kv_begin on."""
    num_tokens = np.diff(query_start)
    num_rows = num_tokens * options.group_size
    # Two narrow tiles are read by different blocks, as is the half of a wide one that stays empty.
    is_wide = num_rows > 2 * options.narrow_rows
    tile_rows = np.where(is_wide, options.wide_rows, options.narrow_rows)
    num_tiles = -(-num_rows // tile_rows)
    sequence = np.repeat(np.arange(len(seq_lens)), num_tiles)
    row = (np.arange(len(sequence)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tile_rows[
        sequence
    ]
    rows = np.minimum(num_rows[sequence] - row, tile_rows[sequence])
    before = (seq_lens - num_tokens)[sequence]
    return _Tiles(
        sequence=sequence,
        first_row=query_start[sequence] * options.group_size + row,
        num_rows=rows,
        kv_begin=kv_begin[sequence],
        kv_end=before + (row + rows - 1) // options.group_size + 1,
        unmasked_end=before + row // options.group_size + 1,
        is_wide=is_wide[sequence],
        is_part=kv_begin[sequence] > 0,
    )


def _prefix_tiles(prefix: SharedPrefix, query_start: Ints, options: PlanOptions) -> _Tiles:
    """The rows of all sequences with a shared prefix, over its keys."""
    first = int(query_start[prefix.first_sequence]) * options.group_size
    end = int(query_start[prefix.first_sequence + prefix.num_sequences]) * options.group_size
    # One read of the keys for as many rows as possible: they are most of the work.
    is_wide = end - first > options.narrow_rows
    tile_rows = options.wide_rows if is_wide else options.narrow_rows
    first_row = np.arange(first, end, tile_rows)
    count = len(first_row)
    tokens = np.full(count, prefix.num_tokens)
    return _Tiles(
        sequence=np.full(count, prefix.first_sequence),
        first_row=first_row,
        num_rows=np.minimum(end - first_row, tile_rows),
        kv_begin=np.zeros(count, dtype=np.int64),
        kv_end=tokens,
        unmasked_end=tokens,
        is_wide=np.full(count, is_wide),
        is_part=np.full(count, True),
    )


def _concatenate(tiles: list[_Tiles]) -> _Tiles:
    names = _Tiles.__dataclass_fields__
    return _Tiles(**{name: np.concatenate([getattr(part, name) for part in tiles]) for name in names})


def part_length(lengths: Ints, options: PlanOptions) -> int:
    """Keys of a part: the least number with which all parts run at once, or all of them."""
    longest = int(lengths.max())
    num_blocks = options.capacity // options.num_kv_heads
    if len(lengths) >= num_blocks or longest <= MIN_PART_TOKENS:
        return longest
    low, high = MIN_PART_TOKENS // PART_MULTIPLE, -(-longest // PART_MULTIPLE)
    while low < high:
        middle = (low + high) // 2
        fits = int((-(-lengths // (middle * PART_MULTIPLE))).sum()) <= num_blocks
        low, high = (low, middle) if fits else (middle + 1, high)
    return low * PART_MULTIPLE


def _divide(tiles: _Tiles, options: PlanOptions) -> AttentionPlan:
    """Divides keys into parts, orders the items, and lists what is to be merged."""
    lengths = tiles.kv_end - tiles.kv_begin
    num_parts = -(-lengths // part_length(lengths, options))
    # Parts of one tile are made equal, so that none is left with a few keys.
    part_tokens = -(-lengths // (num_parts * PART_MULTIPLE)) * PART_MULTIPLE
    num_parts = -(-lengths // part_tokens)
    tile = np.repeat(np.arange(len(lengths)), num_parts)
    part = np.arange(len(tile)) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
    kv_begin = tiles.kv_begin[tile] + part * part_tokens[tile]
    kv_end = np.minimum(kv_begin + part_tokens[tile], tiles.kv_end[tile])
    # Wide tiles first, and the longest ones first among them, so that the last to start are short.
    order = np.lexsort((kv_begin - kv_end, ~tiles.is_wide[tile]))
    tile, kv_begin, kv_end = tile[order], kv_begin[order], kv_end[order]

    num_rows = tiles.num_rows[tile]
    is_part = (num_parts > 1)[tile] | tiles.is_part[tile]
    room = np.where(is_part, num_rows, 0)
    part_row = np.where(is_part, np.cumsum(room) - room, -1)
    items = np.zeros((len(tile), ITEM_WORDS), dtype=np.int32)
    columns = (tiles.sequence[tile], tiles.first_row[tile], num_rows, kv_begin, kv_end)
    for column, values in enumerate((*columns, tiles.unmasked_end[tile], part_row)):
        items[:, column] = values

    # Every row of every part, sorted by row.
    offset = np.arange(int(room.sum())) - np.repeat(np.cumsum(room) - room, room)
    row = np.repeat(tiles.first_row[tile], room) + offset
    by_row = np.argsort(row, kind="stable")
    merge_rows, begins = np.unique(row[by_row], return_index=True)
    return AttentionPlan(
        items=items,
        num_wide=int(tiles.is_wide[tile].sum()),
        merge_rows=merge_rows.astype(np.int32),
        part_start=np.append(begins, len(row)).astype(np.int32),
        part_rows=by_row.astype(np.int32),
        num_part_rows=len(row),
    )
