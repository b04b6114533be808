"""Engines of one process share one pool of threads: no more of them run, and none spins for nothing."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from pagedkv import LLM, SamplingParams, _core
from tiny_llm import Checkpoint, prompts

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def pool_threads() -> int:
    """Threads of this process that belong to the pool of the kernels; they are named so."""
    num_threads = 0
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(OSError):  # A thread may have ended since it was listed.
            num_threads += (task / "comm").read_text().startswith("pagedkv-cpu")
    return num_threads


def cpu_seconds(works: list[Callable[[], object]], *, at_once: bool) -> float:
    """Processor time, of all threads, that the works take."""
    threads = [threading.Thread(target=work) for work in works]
    start = time.process_time()
    for thread in threads:
        thread.start()
        if not at_once:
            thread.join()
    for thread in threads:
        thread.join()
    return time.process_time() - start


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted where Linux lists them")
def test_engines_that_run_at_once_share_the_threads(checkpoint: Checkpoint) -> None:
    llms = [LLM(**checkpoint.options | {"threads": 2}) for _ in range(2)]
    # Long enough that products are shared among the threads.
    crowd = [(part * 400)[:400] for part in prompts(8, checkpoint.vocab_size)]
    answers: dict[int, list[list[int]]] = {}
    most_threads = 0

    def run(idx: int) -> None:
        nonlocal most_threads
        for _ in range(3):
            outputs = llms[idx].generate(crowd, PARAMS, use_tqdm=False)
            answers[idx] = [output.outputs[0].token_ids for output in outputs]
            most_threads = max(most_threads, pool_threads())

    run(0)
    alone = answers[0]
    works = [lambda idx=idx: run(idx) for idx in range(2)]
    one_by_one = cpu_seconds(works, at_once=False)
    at_once = cpu_seconds(works, at_once=True)
    assert _core.num_threads() == 2
    # The caller of a kernel is the other one.
    assert most_threads == 1
    assert answers == {0: alone, 1: alone}
    # Twice the work of one would be what two pools that fight for the cores make of it.
    assert at_once < 2 * one_by_one
