"""The engine on a GPU, as `gpu_check` runs it: its answers, what a step and its launch cost, its memory.

The demo model is small, so a step is short there and what the host does shows most.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv import LLM, SamplingParams
from pagedkv.runner import LaunchedStep, ModelRunner, StepCounts

T = TypeVar("T")

PROMPTS = ["The capital of France is", "Water boils at", "Two plus two is"]
NUM_TOKENS = 128
# What is measured must not depend on how much memory there is.
UTILIZATION = 0.5


VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    ", no overlap": {"overlap": False},
    ", no graphs": {"cuda_graphs": False},
}


class Report(Protocol):
    """Where results go, see `gpu_check.Report`."""

    def has_time(self, needed_s: float) -> bool:
        """Whether something that takes so long may be begun."""

    def check(self, name: str, error: float, tolerance: float) -> None:
        """Notes a failure if the error is larger."""

    def row(self, name: str, value: str) -> None:
        """Adds a line to the table."""


def run(report: Report) -> None:
    """Greedy answers that begin as the CPU's do; what the engine achieves, and without what helps it."""
    expected = answers(new_llm(device="cpu"))
    for name, options in VARIANTS.items():
        llm = new_llm(**options)
        # bf16 rounds differently here and there, so answers may part later; they must begin alike.
        alike = sum(a[:4] == b[:4] for a, b in zip(answers(llm), expected, strict=True))
        report.check(f"engine{name}, answers that begin otherwise", float(len(PROMPTS) - alike), 0.0)
        measure(llm, report, name)
        if not options:
            check_memory(report)
        del llm
        torch.cuda.empty_cache()


def new_llm(**options: Any) -> LLM:
    """The demo model on the GPU, unless `options` say otherwise."""
    usual = {"device": "cuda", "dtype": "bfloat16", "max_model_len": 2048}
    return LLM(**usual | {"gpu_memory_utilization": UTILIZATION} | options)


def answers(llm: LLM) -> list[list[int]]:
    """Greedy answers to the prompts."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def measure(llm: LLM, report: Report, name: str) -> None:
    """Tokens a second, and the share of it that the host takes, at several batch sizes."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    for num in (1, 8, 64, 256):
        if not report.has_time(20):
            return
        with timed_launches(llm) as (launches, waits):
            begin = time.perf_counter()
            llm.generate(PROMPTS[:1] * num, params, use_tqdm=False)
            seconds = time.perf_counter() - begin
        launch, wait = (1e6 * float(np.median(times)) for times in (launches, waits))
        step = 1e6 * seconds / NUM_TOKENS
        report.row(f"engine{name}, {num} answers", f"{num * NUM_TOKENS / seconds:8.0f} tokens/s")
        # With steps that overlap, the wait is the rest of a step; without a wait the host is what takes long.
        report.row("  a step, its launch, the wait", f"{step:8.0f} us {launch:8.0f} us {wait:8.0f} us")


@contextmanager
def timed_launches(llm: LLM) -> Iterator[tuple[list[float], list[float]]]:
    """Seconds of all launches, and of all waits for their results, while it is entered."""
    runner: ModelRunner = llm._engine.runner
    launches: list[float] = []
    waits: list[float] = []
    launch = runner.launch

    def timed_launch(header: StepCounts, arena: NDArray[np.int32]) -> LaunchedStep:
        step = timed(launches, lambda: launch(header, arena))
        result = step.result
        step.result = lambda: timed(waits, result)  # type: ignore[method-assign]
        return step

    runner.launch = timed_launch  # type: ignore[method-assign]
    try:
        yield launches, waits
    finally:
        runner.launch = launch  # type: ignore[method-assign]


def timed(times: list[float], work: Callable[[], T]) -> T:
    """Does something and notes how long that took."""
    begin = time.perf_counter()
    result = work()
    times.append(time.perf_counter() - begin)
    return result


def check_memory(report: Report) -> None:
    """The memory in use, after the largest batches, is within the share that the options allow."""
    free, total = torch.cuda.mem_get_info()
    report.row("memory in use, of all", f"{(total - free) / total:8.1%}, planned {UTILIZATION:.0%}")
    report.check("memory in use beyond the plan", max(0.0, (total - free) / total - UTILIZATION), 0.02)
