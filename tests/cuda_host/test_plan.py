"""The work list: every row sees each of its keys exactly once, in parts of bounded number."""

import numpy as np
import pytest

from pagedkv.ops.cuda_plan import MIN_PART_TOKENS, PlanOptions, plan_attention

BLOCK = 16


def options(**changes):
    fields = {
        "group_size": 4,
        "num_kv_heads": 2,
        "block_size": BLOCK,
        "wide_rows": 64,
        "narrow_rows": 16,
        "capacity": 64,
    }
    return PlanOptions(**fields | changes)


def arrays(lengths, num_shared=0):
    """Arena sections of sequences given as (tokens in the step, tokens in the cache after it)."""
    num_blocks = [-(-seq_len // BLOCK) for _, seq_len in lengths]
    shared = num_shared // BLOCK
    tables, free = [], 1 + shared
    for count in num_blocks:
        tables.append([*range(1, 1 + min(shared, count)), *range(free, free + count - min(shared, count))])
        free += count
    starts = [np.cumsum([0, *sizes]) for sizes in ([num for num, _ in lengths], num_blocks)]
    seq_lens = np.array([seq_len for _, seq_len in lengths])
    sections = (starts[0], seq_lens, starts[1], np.concatenate(tables))
    return [section.astype(np.int32) for section in sections]


def check(lengths, num_shared=0, **changes):
    """Plans, asserts what holds for every plan, and returns it."""
    chosen = options(**changes)
    sections = arrays(lengths, num_shared)
    plan = plan_attention(*sections, chosen)
    query_start, seq_lens, table_start, block_ids = sections
    num_rows = int(query_start[-1]) * chosen.group_size
    seen = [[] for _ in range(num_rows)]
    results = {}
    for index, (sequence, first, count, begin, end, unmasked, part, _) in enumerate(plan.items.tolist()):
        assert 0 < count <= (chosen.wide_rows if index < plan.num_wide else chosen.narrow_rows)
        assert begin < end
        for row in range(first, first + count):
            owner = int(np.searchsorted(query_start, row // chosen.group_size, side="right")) - 1
            before = int(seq_lens[owner] - np.diff(query_start)[owner])
            position = before + row // chosen.group_size - int(query_start[owner])
            assert unmasked <= position + 1
            seen[row].append((begin, min(end, position + 1)))
            # The keys are read through the item's table; they must be the row's own.
            blocks = np.arange(begin // BLOCK, -(-min(end, position + 1) // BLOCK))
            own, read = (block_ids[table_start[s] + blocks] for s in (owner, sequence))
            assert (own == read).all()
            if part >= 0:
                results.setdefault(row, []).append(part + row - first)
            # What goes straight to the output has all of the row's keys.
            assert part >= 0 or (begin == 0 and end > position)
    for row, ranges in enumerate(seen):
        owner = int(np.searchsorted(query_start, row // chosen.group_size, side="right")) - 1
        before = int(seq_lens[owner] - np.diff(query_start)[owner])
        keys = [kv for begin, end in ranges for kv in range(begin, end)]
        assert sorted(keys) == list(range(before + row // chosen.group_size - int(query_start[owner]) + 1))
    parts = [part for group in results.values() for part in group]
    assert sorted(parts) == list(range(plan.num_part_rows))
    assert plan.merge_rows.tolist() == sorted(results)
    for i, row in enumerate(plan.merge_rows.tolist()):
        merged = plan.part_rows[plan.part_start[i] : plan.part_start[i + 1]].tolist()
        assert sorted(merged) == sorted(results[row])
    return plan


def test_decodes_that_fill_the_gpu_are_not_divided():
    plan = check([(1, 500)] * 32)
    assert (len(plan.items), plan.num_wide, plan.num_part_rows) == (32, 0, 0)


def test_one_long_decode_is_divided_until_the_gpu_is_full():
    plan = check([(1, 20_000)])
    lengths = plan.items[:, 4] - plan.items[:, 3]
    assert len(plan.items) == 64 // 2
    assert lengths.max() - lengths.min() < lengths.max()
    assert lengths.min() >= MIN_PART_TOKENS // 2


def test_uneven_lengths_get_parts_of_like_size():
    plan = check([(1, 8_000), (1, 100), (1, 1_000)])
    assert 3 < len(plan.items) <= 32
    assert (np.diff(plan.items[:, 4] - plan.items[:, 3]) <= 0).all()  # the longest first


def test_prompts_take_wide_tiles_and_see_what_is_before_them():
    plan = check([(1, 40), (100, 100), (30, 90), (5, 700)])
    assert plan.num_wide == -(-400 // 64) + -(-120 // 64)


@pytest.mark.parametrize("group_size", [1, 7, 71])
def test_any_ratio_of_heads(group_size):
    check([(1, 300), (40, 60), (3, 1000)], group_size=group_size)


def test_shared_blocks_are_read_once():
    plan = check([(1, 700), (1, 530), (1, 620), (1, 600), (1, 90), (20, 20)], num_shared=512)
    # The rows of the first four sequences, four each, in one tile.
    shared = sorted(item[3:5] for item in plan.items.tolist() if item[1:3] == [0, 16])
    assert (shared[0][0], shared[-1][1]) == (0, 512)
    own = [item for item in plan.items.tolist() if item[1] < 16 and item[2] == 4]
    assert min(item[3] for item in own) == 512


@pytest.mark.parametrize(("count", "num_shared"), [(3, 512), (8, 128)])
def test_little_sharing_does_not_pay(count, num_shared):
    plan = check([(1, 600)] * count, num_shared=num_shared, capacity=1)
    assert len(plan.items) == count


def test_a_token_whose_block_is_shared_keeps_its_own_last_block():
    plan = check([(1, 512)] * 8, num_shared=512)
    own = [item for item in plan.items.tolist() if item[4] == 512]
    assert {item[3] for item in own} == {512 - BLOCK}


def test_random_steps():
    draw = np.random.default_rng(3)
    for _ in range(40):
        decodes = [(1, int(draw.integers(1, 1500))) for _ in range(draw.integers(0, 12))]
        prompts = [
            (int(n), int(n + draw.integers(0, 300))) for n in draw.integers(1, 150, draw.integers(1, 4))
        ]
        check(decodes + prompts, num_shared=int(draw.integers(0, 30)) * BLOCK)
