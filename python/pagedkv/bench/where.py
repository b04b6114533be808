"""Says where the time of a run goes, call by call into Rust, beside what each would take at the least.

Two workloads through `LLM`, greedy, on the CPU: "crowd" is 32 requests at once, 32 to 512 tokens in,
16 to 256 out; "single" is one request, 128 in, 128 out. Every call into `pagedkv._core` is timed, and within
a decoder layer, which is one call, the layer times its kernels; whatever lies between, torch included, is
Python's. A floor is the larger one of two times: the
multiplications at the processor's peak, and the bytes that must be read or written at its read bandwidth;
both are measured in the same run. Small tensors lie in a cache, so calls on them can be faster than their
floors. The timers cost up to a microsecond a call, which counts as Python.
"""

import ctypes
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn

from pagedkv import LLM, SamplingParams, _core
from pagedkv.ops import cpu
from pagedkv.ops.layer import LayerWeights

WORKLOADS = ("crowd", "single")

# Rows of a product up to which it belongs to a line of the table.
_ROW_BOUNDS = (1, 4, 8, 16, 32, 128, 512)
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# A line of the table, operations, bytes.
Cost = tuple[str, float, float]


@dataclass
class Part:
    """The calls of one line of the table."""

    calls: int = 0
    seconds: float = 0.0
    flop: float = 0.0
    bytes: float = 0.0
    floor: float = 0.0


class Clock:
    """Adds up calls by the line that they belong to.

    Attributes:
        parts: the lines.
        peak: operations a second of the arithmetic that the products use.
        bandwidth: bytes a second.
    """

    def __init__(self, peak: float, bandwidth: float) -> None:
        self.parts: defaultdict[str, Part] = defaultdict(Part)
        self.peak = peak
        self.bandwidth = bandwidth

    def add(self, cost: Cost, calls: int, seconds: float) -> None:
        """Adds equal calls, with the cost of each and the time of all."""
        label, flop, num_bytes = cost
        part = self.parts[label]
        part.calls += calls
        part.seconds += seconds
        part.flop += calls * flop
        part.bytes += calls * num_bytes
        part.floor += calls * max(flop / self.peak, num_bytes / self.bandwidth)

    def timed(self, function: Callable[..., Any], cost: Callable[..., Cost]) -> Callable[..., Any]:
        """The function, timed; `cost` says what a call with the same arguments belongs to."""

        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            seconds = time.perf_counter() - start
            self.add(cost(*args), 1, seconds)
            return result

        return call


class Timed:
    """An object of `_core`, or the module, some of whose functions are timed; the rest is as it was."""

    def __init__(self, inner: Any, clock: Clock, costs: dict[str, Callable[..., Cost]]) -> None:
        self._inner = inner
        for name, cost in costs.items():
            setattr(self, name, clock.timed(getattr(inner, name), cost))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _product(weight: _core.PackedLinear, num_rows: int, out_bytes: int) -> Cost:
    in_bytes = _ITEM_BYTES[weight.dtype]
    bound = next((bound for bound in _ROW_BOUNDS if num_rows <= bound), None)
    label = f"linear, over {_ROW_BOUNDS[-1]} rows" if bound is None else f"linear, up to {bound} rows"
    row_bytes = weight.in_size * in_bytes + weight.out_size * out_bytes
    flop = 2.0 * num_rows * weight.num_bytes / in_bytes
    return label, flop, weight.num_bytes + num_rows * row_bytes


def _multiply_cost(weight: _core.PackedLinear) -> Callable[..., Cost]:
    def cost(x: tuple[int, int, int, int], _x_type: str, _out: int, out_type: str) -> Cost:
        return _product(weight, x[1], _ITEM_BYTES[out_type])

    return cost


class Steps:
    """The steps of a run, whose layers time themselves."""

    def __init__(self, layer: LayerWeights) -> None:
        """Notes what all layers have in common with this one."""
        self._layer = layer
        self._plans: list[tuple[_core.StepPlan, NDArray[np.int64], NDArray[np.int64]]] = []

    def make(self, *sections: tuple[int, int]) -> _core.StepPlan:
        """Makes a plan, and keeps it."""
        starts, ends = (
            np.array((ctypes.c_int32 * length).from_address(address), dtype=np.int64)
            for address, length in sections[:2]
        )
        plan = _core.StepPlan(*sections)
        self._plans.append((plan, np.diff(starts), ends))
        return plan

    def add_to(self, clock: Clock) -> None:
        """Reads the timers of the layers, and forgets the steps."""
        for plan, lens, ends in self._plans:
            costs = self._costs(lens, ends)
            for phase, (calls, seconds) in plan.phases().items():
                if calls:
                    clock.add(costs[phase], calls, seconds)
        self._plans.clear()

    def _costs(self, lens: NDArray[np.int64], ends: NDArray[np.int64]) -> dict[str, Cost]:
        """What a call of each phase costs, with `lens` tokens of sequences of which `ends` are known then."""
        layer, num_tokens = self._layer, int(lens.sum())
        weights = cast(
            dict[str, _core.PackedLinear],
            {"qkv": layer.qkv, "out": layer.out, "gate_up": layer.gate_up, "down": layer.down},
        )
        item_bytes = _ITEM_BYTES[weights["qkv"].dtype]
        costs = {phase: _product(weight, num_tokens, item_bytes) for phase, weight in weights.items()}
        # Token i of n sees the end minus (n - 1 - i) positions.
        scores = float((lens * ends - lens * (lens - 1) // 2).sum())
        query_size, kv_size = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        label = "attention, with prompts" if lens.max(initial=0) > 1 else "attention, one token each"
        num_elements = 2.0 * (float(ends.sum()) * kv_size + num_tokens * query_size)
        costs["attention"] = (label, 4 * scores * query_size, num_elements * item_bytes)
        num_elements = 2.0 * num_tokens * (query_size + 2 * kv_size)
        costs["rope_cache"] = ("rope_cache", 0.0, num_elements * item_bytes)
        num_elements = 4.0 * num_tokens * weights["qkv"].in_size
        costs["norm"] = ("norms", 0.0, num_elements * item_bytes)
        costs["plan"] = ("plan of attention", 0.0, 0.0)
        return costs


def _norm_cost(_out: int, _x: int, residual: int, *args: Any) -> Cost:
    num_rows, width, row_type = args[1], args[2], args[5]
    return "norms", 0.0, float((4 if residual else 2) * num_rows * width * _ITEM_BYTES[row_type])


def _sample_cost(*args: Any) -> Cost:
    return "sample", 0.0, 4.0 * args[3] * args[4]


def _free(label: str) -> Callable[..., Cost]:
    """What has no floor worth a name."""
    return lambda *_: (label, 0.0, 0.0)


def _wrap(llm: LLM, clock: Clock) -> Steps:
    """Puts timers between the engine, the model and the operations on one side, and Rust on the other.

    The layers time themselves: what they took is in the steps that are returned.
    """
    engine: Any = llm._engine
    engine.core = Timed(engine.core, clock, dict.fromkeys(("schedule", "commit"), _free("scheduler")))
    module: Any = Timed(
        _core,
        clock,
        {"rms_norm": _norm_cost, "sample": _sample_cost, "copy_blocks": _free("copy_blocks")},
    )
    network = engine.runner.model
    steps = Steps(network.model.packed[0])
    module.StepPlan = steps.make
    vars(cpu)["_core"] = module
    for part in network.modules():
        _wrap_weights(part, clock)
    return steps


def _wrap_weights(part: nn.Module, clock: Clock) -> None:
    for name, weight in vars(part).items():
        if isinstance(weight, _core.PackedLinear):
            costs = {"multiply": _multiply_cost(weight), "rows": _free("embedding")}
            setattr(part, name, Timed(weight, clock, costs))


def requests(workload: str, run: int, vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters of a run: the same lengths in every one, other tokens."""
    lengths = random.Random(0)
    shapes = [(128, 128)]
    if workload == "crowd":
        shapes = [(lengths.randint(32, 512), lengths.randint(16, 256)) for _ in range(32)]
    source = random.Random(2000 + run)
    prompts = [[source.randrange(3, vocab_size) for _ in range(prompt_len)] for prompt_len, _ in shapes]
    return prompts, [SamplingParams(temperature=0, max_tokens=num, ignore_eos=True) for _, num in shapes]


def run(model: str | None, dtype: str, workloads: Sequence[str]) -> list[dict[str, Any]]:
    """Runs the workloads, each first without timers; prints a table for each and returns the figures."""
    llm = LLM(model, device="cpu", dtype=dtype, max_model_len=4096, kv_memory="2GiB")
    head = getattr(llm._engine.runner.model, "head", None)
    if not isinstance(head, _core.PackedLinear):
        raise ValueError("the kernels in Rust do not run here: torch multiplies")

    def seconds(workload: str, run: int) -> float:
        start = time.perf_counter()
        llm.generate(*requests(workload, run, llm.tokenizer.vocab_size), use_tqdm=False)
        return time.perf_counter() - start

    for workload in workloads:
        seconds(workload, 0)
    ceilings = _core.cpu_ceilings()
    untimed = [seconds(workload, 1) for workload in workloads]
    clock = Clock(ceilings.get(head.arithmetic, float("inf")), ceilings["read"])
    steps = _wrap(llm, clock)
    results = []
    try:
        for workload, without in zip(workloads, untimed, strict=True):
            clock.parts.clear()
            whole = seconds(workload, 2)
            steps.add_to(clock)
            parts = dict(clock.parts)
            num_steps = parts["scheduler"].calls // 2
            parts["Python"] = Part(num_steps, whole - sum(part.seconds for part in parts.values()))
            print(
                f"{workload}: {whole:.2f} s, {without:.2f} s without timers; {_core.num_threads()} threads,"
                f" {head.arithmetic} at {clock.peak / 1e9:.0f} GFLOP/s, read {clock.bandwidth / 1e9:.1f} GB/s"
            )
            _print(parts, whole)
            results.append(
                {
                    "workload": workload,
                    "seconds": whole,
                    "untimed_seconds": without,
                    "arithmetic": head.arithmetic,
                    "ceilings": ceilings,
                    "parts": {label: asdict(part) for label, part in parts.items()},
                }
            )
    finally:
        vars(cpu)["_core"] = _core
    return results


def _print(parts: dict[str, Part], seconds: float) -> None:
    print(f"{'':28}{'calls':>8}{'s':>8}{'share':>7}{'GFLOP/s':>9}{'GB/s':>7}{'floor s':>9}{'x floor':>9}")
    for label, part in sorted(parts.items(), key=lambda item: -item[1].seconds):
        ratio = f"{part.seconds / part.floor:.2f}" if part.floor else "-"
        print(
            f"{label:28}{part.calls:8}{part.seconds:8.3f}{part.seconds / seconds:7.1%}"
            f"{part.flop / part.seconds / 1e9:9.0f}{part.bytes / part.seconds / 1e9:7.1f}"
            f"{part.floor:9.3f}{ratio:>9}"
        )
