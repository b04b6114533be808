"""Says where the time of a run goes, kernel by kernel, beside what each would take at the least.

Workloads through `LLM`, on the CPU: "crowd" is 32 requests at once, 32 to 512 tokens in, 16 to 256 out;
"single" is one request, 128 in, 128 out; "shared" is 64 requests with 1,024 tokens in common and 32 of
their own, 32 out; "samples" is 16 samples of a prompt of 512 tokens, 64 out. All but those are greedy. The
core and sampling are timed call by call, the forward pass, which is one call into Rust, times its kernels
itself; whatever lies between, torch included, is Python's. A floor is the larger one of two times: the
multiplications at the processor's peak (that of vectors for attention in float32), and the bytes that must be
read or written at its read bandwidth; all are measured in the same run. Small tensors, and blocks that
sequences share, lie in a cache, so calls on them can be faster than their floors. What the accounts take is
left out.
"""

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
from torch import Tensor

from pagedkv import LLM, SamplingParams, _core
from pagedkv.batch import StepBatch
from pagedkv.ops import cpu
from pagedkv.ops.decoder import DecoderWeights

WORKLOADS = ("crowd", "single", "shared", "samples")

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
        attention_peak: that of attention.
        bandwidth: bytes a second.
        own_seconds: what the clock itself took.
    """

    def __init__(self, peak: float, attention_peak: float, bandwidth: float) -> None:
        self.parts: defaultdict[str, Part] = defaultdict(Part)
        self.peak = peak
        self.attention_peak = attention_peak
        self.bandwidth = bandwidth
        self.own_seconds = 0.0

    def add(self, cost: Cost, calls: int, seconds: float) -> None:
        """Adds equal calls, with the cost of each and the time of all."""
        label, flop, num_bytes = cost
        part = self.parts[label]
        part.calls += calls
        part.seconds += seconds
        part.flop += calls * flop
        part.bytes += calls * num_bytes
        peak = self.attention_peak if label.startswith("attention") else self.peak
        part.floor += calls * max(flop / peak, num_bytes / self.bandwidth)

    def timed(self, function: Callable[..., Any], cost: Callable[..., Cost]) -> Callable[..., Any]:
        """The function, timed; `cost` says what a call with the same arguments belongs to."""

        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            end = time.perf_counter()
            self.add(cost(*args), 1, end - start)
            self.own_seconds += time.perf_counter() - end
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


def _product(weight: _core.PackedLinear, num_rows: int, out_bytes: int, mean_rows: float) -> Cost:
    """Of calls that have so many rows, or in the mean fewer."""
    in_bytes = _ITEM_BYTES[weight.dtype]
    bound = next((bound for bound in _ROW_BOUNDS if num_rows <= bound), None)
    label = f"linear, over {_ROW_BOUNDS[-1]} rows" if bound is None else f"linear, up to {bound} rows"
    row_bytes = weight.in_size * in_bytes + weight.out_size * out_bytes
    flop = 2.0 * mean_rows * weight.num_elements
    return label, flop, weight.num_bytes + mean_rows * row_bytes


class TimedOps:
    """The CPU's operations, whose forward pass times its kernels; the rest is as it was."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(cpu, name)

    def forward(self, model: DecoderWeights, batch: StepBatch, *args: Any) -> Tensor:
        """Computes as ever, and adds up what the kernels took."""
        logits = cpu.forward(model, batch, *args)
        start = time.perf_counter()
        costs = _phase_costs(model, batch)
        plan: _core.StepPlan = batch.prepared[cpu.name]
        for phase, (calls, seconds) in plan.phases().items():
            self._clock.add(costs[phase], calls, seconds)
        self._clock.own_seconds += time.perf_counter() - start
        return logits


def _phase_costs(model: DecoderWeights, batch: StepBatch) -> dict[str, Cost]:
    """What a call of a kernel costs in each phase of a step."""
    lens, ends = batch.query_start.numpy().astype(np.int64), batch.seq_lens.numpy().astype(np.int64)
    lens = np.diff(lens)
    num_tokens, num_rows = len(batch.token_ids), len(batch.sample_rows)
    layer = model.layers[0]
    weights = cast(
        dict[str, _core.PackedLinear],
        {"qkv": layer.qkv, "out": layer.out, "gate_up": layer.gate_up, "down": layer.down},
    )
    head = cast(_core.PackedLinear, model.head)
    item_bytes = _ITEM_BYTES[head.dtype]
    # Behind the attention of the last layer there are only the sampled rows.
    mean_rows: float = num_tokens
    if num_rows > 0:
        mean_rows -= (num_tokens - num_rows) / len(model.layers)
    # What is added to the residual reads it where it is written.
    out_bytes = {"qkv": item_bytes, "out": 2 * item_bytes, "gate_up": item_bytes, "down": 2 * item_bytes}
    costs = {
        phase: _product(weight, num_tokens, out_bytes[phase], num_tokens if phase == "qkv" else mean_rows)
        for phase, weight in weights.items()
    }
    costs["head"] = _product(head, num_rows, _ITEM_BYTES["float32"], num_rows)
    # Token i of n sees the end minus (n - 1 - i) positions.
    scores = float((lens * ends - lens * (lens - 1) // 2).sum())
    query_size, kv_size = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    label = "attention, with prompts" if lens.max(initial=0) > 1 else "attention, one token each"
    num_elements = 2.0 * (float(ends.sum()) * kv_size + num_tokens * query_size)
    costs["attention"] = (label, 4 * scores * query_size, num_elements * item_bytes)
    num_elements = 2.0 * num_tokens * (query_size + 2 * kv_size)
    costs["rope_cache"] = ("rope_cache", 0.0, num_elements * item_bytes)
    for phase, rows in (("norm", num_tokens), ("final_norm", num_rows)):
        costs[phase] = ("norms", 0.0, 2.0 * rows * head.in_size * item_bytes)
    return costs | {"plan": ("plan of attention", 0.0, 0.0), "embedding": ("embedding", 0.0, 0.0)}


def _sample_cost(*args: Any) -> Cost:
    return "sample", 0.0, 4.0 * args[3] * args[4]


def _free(label: str) -> Callable[..., Cost]:
    """What has no floor worth a name."""
    return lambda *_: (label, 0.0, 0.0)


def _wrap(llm: LLM, clock: Clock) -> None:
    """Puts timers between the engine and the operations on one side, and Rust on the other."""
    engine: Any = llm._engine
    engine.core = Timed(engine.core, clock, dict.fromkeys(("schedule", "commit"), _free("scheduler")))
    engine.runner.ops = TimedOps(clock)
    costs = {"sample": _sample_cost, "copy_blocks": _free("copy_blocks")}
    vars(cpu)["_core"] = Timed(_core, clock, costs)


def requests(workload: str, run: int, vocab_size: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters of a run: the same lengths in every one, other tokens."""
    source = random.Random(2000 + run)

    def tokens(num: int) -> list[int]:
        return [source.randrange(3, vocab_size) for _ in range(num)]

    def params(max_tokens: int, temperature: float = 0, n: int = 1) -> SamplingParams:
        return SamplingParams(temperature=temperature, max_tokens=max_tokens, n=n, seed=run, ignore_eos=True)

    match workload:
        case "crowd":
            lengths = random.Random(0)
            shapes = [(lengths.randint(32, 512), lengths.randint(16, 256)) for _ in range(32)]
            return [tokens(num) for num, _ in shapes], [params(num) for _, num in shapes]
        case "shared":
            prefix = tokens(1024)
            return [prefix + tokens(32) for _ in range(64)], [params(32)] * 64
        case "samples":
            return [tokens(512)], [params(64, temperature=1, n=16)]
        case _:
            return [tokens(128)], [params(128)]


def run(
    model: str | None, dtype: str, cpu_isa: str, workloads: Sequence[str], *, prefix_cache: bool = True
) -> list[dict[str, Any]]:
    """Runs the workloads, each first without timers; prints a table for each and returns the figures."""
    llm = LLM(
        model,
        device="cpu",
        dtype=dtype,
        cpu_isa=cpu_isa,
        max_model_len=4096,
        kv_memory="4GiB",
        enable_prefix_caching=prefix_cache,
    )
    head = llm._engine.runner.model.packed.head
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
    peak = ceilings.get(head.arithmetic, float("inf"))
    attention_peak = ceilings.get("avx512", float("inf")) if head.dtype == "float32" else peak
    clock = Clock(peak, attention_peak, ceilings["read"])
    _wrap(llm, clock)
    results = []
    try:
        for workload, without in zip(workloads, untimed, strict=True):
            clock.parts.clear()
            clock.own_seconds = 0.0
            whole = seconds(workload, 2) - clock.own_seconds
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
