"""Times the core's part of a step, called from Python as the engine calls it: `schedule`, then `commit`.

Sequences decode one token each. The figures are medians of single calls; the clock itself costs some 0.1 us.
"""

import gc
import time
from statistics import median
from typing import Any

import numpy as np

from pagedkv import _core

NUM_SEQUENCES = (1, 64, 256, 1024)
SEQUENCE_LEN = 512
LONG_LEN = 8192
BLOCK_SIZE = 16
_NUM_STEPS = 400
_NUM_WARM_UP = 40
# Prompt tokens of a step, so many that no sequence ends before the last prompt is computed.
_MOST_TOKENS = 1 << 20


def time_steps(num_sequences: int, sequence_len: int) -> dict[str, Any]:
    """Decodes `num_sequences` sequences of `sequence_len` tokens and returns the medians, in microseconds.

    Keys: sequences, schedule_us, commit_us, step_us (both together). The sequences share no blocks and grow
    by some 400 tokens while they are timed.
    """
    num_tokens = sequence_len + _NUM_STEPS + _NUM_WARM_UP + 1
    num_blocks = num_sequences * (num_tokens // BLOCK_SIZE + 1)
    core = _core.Core(
        # Admission leaves one percent of the blocks to the growth of what runs.
        num_blocks=num_blocks + num_blocks // 50 + 16,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=min(num_sequences * sequence_len, _MOST_TOKENS),
        max_model_len=num_tokens,
    )
    arena = np.zeros(core.arena_len, np.int32)
    for number in range(num_sequences):
        prompt = np.arange(sequence_len, dtype=np.int32) + number * sequence_len
        core.edge.submit(prompt, max_tokens=num_tokens - sequence_len, ignore_eos=True)
    num_decodes = 0
    while num_decodes < num_sequences:
        header = core.schedule(arena)
        if header is None:
            raise RuntimeError("the core has nothing to run")
        core.commit(header.step_id, np.full(header.num_rows, 7, np.int32))
        num_decodes = header.num_decodes
    sampled = np.full(num_sequences, 7, np.int32)
    schedule_us, commit_us = [], []
    collects = gc.isenabled()
    gc.disable()
    try:
        for _ in range(_NUM_STEPS):
            start = time.perf_counter_ns()
            header = core.schedule(arena)
            scheduled = time.perf_counter_ns()
            if header is None or header.num_decodes != num_sequences:
                break
            core.commit(header.step_id, sampled)
            committed = time.perf_counter_ns()
            schedule_us.append((scheduled - start) / 1e3)
            commit_us.append((committed - scheduled) / 1e3)
    finally:
        if collects:
            gc.enable()
    schedule_us, commit_us = schedule_us[_NUM_WARM_UP:], commit_us[_NUM_WARM_UP:]
    return {
        "sequences": num_sequences,
        "schedule_us": median(schedule_us),
        "commit_us": median(commit_us),
        "step_us": median(map(sum, zip(schedule_us, commit_us, strict=True))),
    }


def run() -> list[dict[str, Any]]:
    """Times both lengths, prints them, and returns the figures of the short sequences."""
    results = []
    print(f"{'tokens':>8}{'sequences':>11}{'schedule us':>13}{'commit us':>11}{'step us':>9}")
    for sequence_len in (SEQUENCE_LEN, LONG_LEN):
        for num_sequences in NUM_SEQUENCES:
            result = time_steps(num_sequences, sequence_len)
            print(
                f"{sequence_len:8}{num_sequences:11}{result['schedule_us']:13.2f}"
                f"{result['commit_us']:11.2f}{result['step_us']:9.2f}"
            )
            if sequence_len == SEQUENCE_LEN:
                results.append(result)
    return results
