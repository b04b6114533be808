"""On a machine with a GPU: checks every kernel there, then measures, then runs the engine. `make gpu-check`.

It needs torch, CuPy and pagedkv, from a wheel or a checkout, and no Rust. Correctness comes first and decides
the exit status; a table of measurements comes last. New work is not begun after the time limit.
"""

import argparse
import itertools
import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import gpu_engine
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedkv.batch import SamplingRows, StepBatch
from pagedkv.decode_graphs import NO_SECTIONS, decode_layout
from pagedkv.ops import reference
from pagedkv.ops.cuda import CudaOps
from pagedkv.ops.cuda_attention import plan_sections
from pagedkv.ops.cuda_device import Gpu
from pagedkv.ops.cuda_kernels import BULK_HEAD_DIMS, HEAD_DIMS, MIN_BULK_ARCH, all_kernels
from pagedkv.ops.cuda_plan import empty_plan
from pagedkv.stage import DeviceStage

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4}
FP8 = torch.float8_e4m3fn
# Replaced where the checks themselves are tested without a GPU.
DEVICE = torch.device("cuda")
# Tokens of the graph that is checked.
GRAPH_SIZE = 8
Lengths = list[tuple[int, int]]  # of each sequence: tokens in the step, tokens in the cache after it


@dataclass
class Report:
    """What was found, and how much time is left."""

    limit_s: float
    begin: float = field(default_factory=time.monotonic)
    failures: list[str] = field(default_factory=list)
    rows: list[tuple[str, str]] = field(default_factory=list)

    def has_time(self, needed_s: float) -> bool:
        """Whether something that takes so long may be begun."""
        return time.monotonic() - self.begin + needed_s < self.limit_s

    def check(self, name: str, error: float, tolerance: float) -> None:
        """Notes a failure if the error is larger, or NaN."""
        if not error <= tolerance:
            self.failures.append(f"{name}: error {error:.1e}, allowed {tolerance:.1e}")

    def row(self, name: str, value: str) -> None:
        """Prints a line of the table and keeps it."""
        self.rows.append((name, value))
        print(f"  {name:44} {value}", flush=True)


@dataclass
class Step:
    """Queries, a layer's cache and the batch that leads from one to the other."""

    q: Tensor
    caches: list[tuple[Tensor, Tensor]]  # of several layers, so that no measurement finds its data in a cache
    batch: StepBatch

    @property
    def scale(self) -> float:
        """The usual factor of the scores."""
        return float(self.q.shape[-1] ** -0.5)


def make_step(
    lengths: Lengths, heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype,
    stored: torch.dtype, num_layers: int = 1,
) -> Step:  # fmt: skip
    """Random keys in shuffled blocks, without unused ones."""
    counts = [-(-seq_len // block_size) for _, seq_len in lengths]
    starts = torch.tensor([0, *counts]).cumsum(0)
    block_ids = torch.randperm(int(starts[-1])) + 1
    positions = torch.cat([torch.arange(seq_len - num, seq_len) for num, seq_len in lengths])
    empty = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    batch = StepBatch(
        token_ids=empty,
        token_source=empty,
        positions=positions.int().to(DEVICE),
        slot_mapping=empty,
        query_start=torch.tensor([0, *(num for num, _ in lengths)]).cumsum(0).int().to(DEVICE),
        seq_lens=torch.tensor([seq_len for _, seq_len in lengths]).int().to(DEVICE),
        table_start=starts.int().to(DEVICE),
        block_ids=block_ids.int().to(DEVICE),
        sample_rows=empty,
        sampling=SamplingRows(torch.empty((0, 9), dtype=torch.int32)),
        copies=empty.view(0, 2),
        beams=empty.view(0, 2),
        num_decodes=sum(num == 1 for num, _ in lengths),
    )
    shape = (int(starts[-1]) + 1, heads[1], block_size, head_dim)

    def cache() -> Tensor:
        return torch.randn(shape, device=DEVICE, dtype=dtype).to(stored)

    q = torch.randn((len(positions), heads[0], head_dim), device=DEVICE, dtype=dtype)
    return Step(q, [(cache(), cache()) for _ in range(num_layers)], batch)


def relative_error(given: Tensor, expected: Tensor) -> float:
    """The difference's norm over that of what is expected."""
    return float((given.double() - expected.double()).norm() / expected.double().norm())


# ---- correctness


DECODES: Lengths = [(1, 1), (1, 37), (1, 4000), (1, 333)]
MIXED: Lengths = [(1, 900), (1, 33), (330, 330), (200, 900), (5, 3000)]
HEAD_COUNTS = ((8, 2), (7, 1), (4, 4))


def check_attention(ops: CudaOps, report: Report, batches: tuple[Lengths, ...] = (DECODES, MIXED)) -> None:
    """Every head size and element type, over caches of both kinds, for each of the batches."""
    shapes = itertools.product(TOLERANCE, HEAD_DIMS, (8, 16, 256), (False, True), batches)
    for index, (dtype, head_dim, block_size, fp8, lengths) in enumerate(shapes):
        heads = HEAD_COUNTS[index % len(HEAD_COUNTS)]
        stored = FP8 if fp8 else dtype
        step = make_step(lengths, heads, head_dim, block_size, dtype, stored)
        keys, values = step.caches[0]
        given = ops.paged_attention(step.q, keys, values, step.batch, step.scale)
        exact = reference.paged_attention(
            step.q.float(), keys.float(), values.float(), step.batch, step.scale
        )
        label = f"attention, {len(lengths)} sequences, D {head_dim}, block {block_size}, {dtype}, {stored}"
        report.check(label, relative_error(given, exact), TOLERANCE[dtype])


def check_bulk(ops: CudaOps, report: Report, lengths: Lengths = DECODES) -> None:
    """Bulk copies, where the GPU has them, over caches whose chunks lie as they want them."""
    if int(ops.device.arch.removeprefix("sm_")) < MIN_BULK_ARCH:
        report.row("bulk copies", f"not on {ops.device.arch}")
        return
    bulk = CudaOps(ops.device, swizzled=True)
    for dtype, head_dim in itertools.product(TOLERANCE, BULK_HEAD_DIMS):
        step = make_step(lengths, (8, 2), head_dim, 16, dtype, dtype)
        keys, values = step.caches[0]
        given = bulk.paged_attention(step.q, swizzle(keys), swizzle(values), step.batch, step.scale)
        exact = reference.paged_attention(
            step.q.float(), keys.float(), values.float(), step.batch, step.scale
        )
        report.check(f"bulk, D {head_dim}, {dtype}", relative_error(given, exact), TOLERANCE[dtype])


def swizzle(cache: Tensor) -> Tensor:
    """A cache with chunk c of 16 bytes of slot s at place c ^ (s & 7), see `cuda/attention_bulk.cu`."""
    chunks = cache.unflatten(3, (-1, 8))
    slots = torch.arange(cache.shape[2], device=cache.device)[:, None]
    order = torch.arange(chunks.shape[3], device=cache.device) ^ (slots & 7)
    return chunks.take_along_dim(order[None, None, :, :, None], 3).flatten(3)


def check_rows(ops: CudaOps, report: Report) -> None:
    """The kernels that work row by row, and those that write the cache."""
    for dtype, tolerance in TOLERANCE.items():
        x, residual = (torch.randn(37, 4096, device=DEVICE, dtype=dtype) for _ in range(2))
        weight = torch.randn(4096, device=DEVICE, dtype=dtype)
        total = x + residual
        out = ops.add_rms_norm(x, residual, weight, 1e-5)
        report.check(f"sum, {dtype}", relative_error(residual, total), 0.0)
        report.check(
            f"norm, {dtype}", relative_error(out, reference.rms_norm(total, weight, 1e-5)), tolerance
        )
        report.check(
            f"silu_mul, {dtype}",
            relative_error(ops.silu_mul(x, residual), reference.silu_mul(x, residual)),
            tolerance,
        )
        q, k, v = (torch.randn(37, heads, 128, device=DEVICE, dtype=dtype) for heads in (32, 8, 8))
        angles = torch.rand(100, 64, device=DEVICE).repeat(1, 2) * 6
        positions = torch.randint(100, (37,), device=DEVICE, dtype=torch.int32)
        slots = torch.randperm(10 * 16, device=DEVICE)[:37].int()
        given = [torch.zeros(10, 8, 16, 128, device=DEVICE, dtype=dtype) for _ in range(2)]
        exact = [torch.zeros(10, 8, 16, 128, device=DEVICE) for _ in range(2)]
        rotated = ops.rope_cache(q, k, v, angles.cos(), angles.sin(), positions, *given, slots)
        wide = reference.rope_cache(
            q.float(), k.float(), v.float(), angles.cos(), angles.sin(), positions, *exact, slots
        )
        for label, a, b in (("q", rotated, wide), ("k", given[0], exact[0]), ("v", given[1], exact[1])):
            report.check(f"rope_cache, {label}, {dtype}", relative_error(a, b), tolerance)
        copies = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=DEVICE)
        expected = [cache.clone() for cache in given]
        reference.copy_blocks([(expected[0], expected[1])], copies)
        ops.copy_blocks([(given[0], given[1])], copies)
        report.check(f"copy_blocks, {dtype}", relative_error(given[0], expected[0]), 0.0)


def check_sample(ops: CudaOps, report: Report, vocab_size: int = 128_256) -> None:
    """The same tokens as the reference on the CPU draws."""
    logits = 3 * torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(1))
    words = torch.zeros((40, 9), dtype=torch.int32)
    floats = torch.ones(40, 3)
    floats[:, 2] = 0
    floats[0:8, 0] = 0
    floats[8:16, 1] = 0.9
    floats[16:24, 2] = 0.02
    words[:, :3] = floats.view(torch.int32)
    words[24:32, 3] = 50
    words[:, 4] = torch.arange(40)
    words[:, 8] = -1
    given = ops.sample(logits.to(DEVICE), SamplingRows(words, words.to(DEVICE)))
    expected = reference.sample(logits, SamplingRows(words))
    report.check("sample, rows that differ", float((given.cpu() != expected).sum()), 0.0)


def check_graph(ops: CudaOps, report: Report, head_dim: int = 128) -> None:
    """A graph that was captured with nothing to do follows lengths and tables that change in place."""
    options = ops.attention.options((32, head_dim), torch.empty((1, 8, 16, head_dim), dtype=torch.bfloat16))
    layout = decode_layout(GRAPH_SIZE, options, blocks_per_seq=400)
    stage = DeviceStage(ops.device, options, layout.num_words)
    words = torch.zeros(layout.num_words, dtype=torch.int32, device=DEVICE)
    batch = layout.batch(words)
    shape = (GRAPH_SIZE * 400, 8, 16, head_dim)
    keys, values = (torch.zeros(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    q, out = (torch.zeros((GRAPH_SIZE, 32, head_dim), device=DEVICE, dtype=torch.bfloat16) for _ in range(2))

    def work() -> None:
        out.copy_(ops.paged_attention(q, keys, values, batch, head_dim**-0.5))

    def send(step: Step | None) -> None:
        sections = NO_SECTIONS if step is None else sections_of(step.batch)
        plan = empty_plan() if step is None else plan_sections(sections, options)
        buffer = stage.buffers.take(layout.num_words)
        stage.buffers.send(layout.pack(sections, plan, buffer), words)

    with ops.device.active():
        send(None)
        work()
        graph = ops.device.capture(work)
        for lengths in ([1, 37, 130], [5000], [900, 5, 64, 65], [300] * GRAPH_SIZE):
            made = make_step([(1, n) for n in lengths], (32, 8), head_dim, 16, torch.bfloat16, torch.bfloat16)
            for cache, given in zip((keys, values), made.caches[0], strict=True):
                cache[: len(given)] = given
            q[: len(lengths)] = made.q
            send(made)
            graph.replay()
            exact = reference.paged_attention(
                made.q.float(), keys.float(), values.float(), made.batch, made.scale
            )
            error = relative_error(out[: len(lengths)], exact)
            report.check(f"a replay of {len(lengths)} decodes", error, TOLERANCE[torch.bfloat16])


def sections_of(batch: StepBatch) -> dict[str, NDArray[np.int32]]:
    """A batch of decodes as the sections of an arena."""
    num_tokens = len(batch.positions)
    sections = {name: np.zeros(num_tokens, np.int32) for name in ("token_ids", "slot_mapping", "sample_rows")}
    sections |= {"token_source": np.full(num_tokens, -1, np.int32), "copies": np.zeros(0, np.int32)}
    sections["sampling"] = np.zeros(9 * num_tokens, np.int32)
    for name in ("positions", "query_start", "seq_lens", "table_start", "block_ids"):
        sections[name] = getattr(batch, name).cpu().numpy()
    return sections


# ---- measurements


def measure_us(calls: list[Callable[[], object]], repeats: int = 20) -> float:
    """Median time of calls taken in turn, each captured in a graph, so that the host's does not count."""
    graphs = []
    for call in calls:
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graphs.append(graph)
    pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(repeats)]
    for i, (begin, end) in enumerate(pairs):
        begin.record()
        graphs[i % len(graphs)].replay()
        end.record()
    torch.cuda.synchronize()
    return 1000 * sorted(begin.elapsed_time(end) for begin, end in pairs)[repeats // 2]


def measure_ceilings(report: Report) -> float:
    """What the card copies, in bytes a microsecond."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / measure_us([lambda: target.copy_(source)])
    matrix = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    flops = 2 * 8192**3 / measure_us([lambda: matrix @ matrix])
    report.row("copy", f"{copy / 1e6:.2f} TB/s")
    report.row("matrix product, bf16", f"{flops / 1e6:.0f} TFLOP/s")
    return copy


def measure_decodes(ops: CudaOps, report: Report, copy: float) -> None:
    """Batches of decodes at several lengths and block sizes; `copy` is what `measure_ceilings` found."""
    cases = [(64, 4096, size) for size in (8, 16, 64, 256)]
    cases += [(8, 4096, 16), (256, 1024, 16), (1, 32_768, 16), (16, 16_384, 16)]
    kinds = [("bf16", ops, torch.bfloat16), ("e4m3", ops, FP8)]
    if int(ops.device.arch.removeprefix("sm_")) >= MIN_BULK_ARCH:
        kinds.insert(1, ("bf16 by bulk copies", CudaOps(ops.device, swizzled=True), torch.bfloat16))
    for kind, chosen, stored in kinds:
        for num, seq_len, block_size in cases:
            if not report.has_time(15):
                return
            step = make_step(
                [(1, seq_len)] * num, (32, 8), 128, block_size, torch.bfloat16, stored, num_layers=2
            )
            us = measure_us(
                [
                    partial(chosen.paged_attention, step.q, *layer, step.batch, step.scale)
                    for layer in step.caches
                ]
            )
            num_bytes = num * seq_len * 8 * 128 * 2 * stored.itemsize
            share = num_bytes / us / copy
            name = f"decode {num} x {seq_len}, block {block_size}, {kind}"
            report.row(name, f"{us:8.1f} us  {num_bytes / us / 1e6:5.2f} TB/s  {share:4.0%} of a copy")


def measure_prompts(ops: CudaOps, report: Report) -> None:
    """Whole prompts, and a chunk behind a long prefix."""
    for num, seq_len in ((8192, 8192), (2048, 2048), (2048, 16_384)):
        if not report.has_time(15):
            return
        step = make_step([(num, seq_len)], (32, 8), 128, 16, torch.bfloat16, torch.bfloat16)
        keys, values = step.caches[0]
        us = measure_us([lambda: ops.paged_attention(step.q, keys, values, step.batch, step.scale)], 10)  # noqa: B023
        pairs = num * (seq_len - num) + num * (num + 1) / 2
        report.row(
            f"prompt {num} of {seq_len}", f"{us:8.1f} us  {4 * 32 * 128 * pairs / us / 1e6:4.0f} TFLOP/s"
        )


def measure_torch(report: Report) -> None:
    """Torch's own attention over keys without blocks, to compare with."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q = torch.randn(64, 32, 1, 128, device=DEVICE, dtype=torch.bfloat16)
    k, v = (torch.randn(64, 8, 4096, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            with sdpa_kernel(backend):
                us = measure_us(
                    [lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)]
                )
        except RuntimeError as error:
            report.row(f"torch, {backend.name}", str(error).splitlines()[0][:60])
        else:
            report.row(f"torch, {backend.name}, 64 x 4096", f"{us:8.1f} us")


def main() -> int:
    """Does everything; 0 if all checks passed, 2 without a GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--limit-s", type=float, default=440, help="begin nothing new after this many seconds"
    )
    parser.add_argument("--json", type=Path, help="write the table there as well")
    parser.add_argument(
        "--host", action="store_true", help="only try the checks, on kernels that the CPU executes"
    )
    arguments = parser.parse_args()
    if arguments.host:
        return try_on_host()
    if not torch.cuda.is_available():
        print(
            "torch sees no GPU; without one, the kernels are checked by make test-cuda-host", file=sys.stderr
        )
        return 2
    report = Report(arguments.limit_s)
    torch.manual_seed(0)
    gpu = Gpu(torch.device("cuda:0"))
    print(f"{torch.cuda.get_device_name()}, {gpu.arch}, torch {torch.__version__}", flush=True)
    gpu.prepare(all_kernels())
    ops = CudaOps(gpu)
    checks = (check_attention, check_bulk, check_rows, check_sample, check_graph)
    for check in checks:
        attempt(report, check.__name__, lambda check=check: check(ops, report))
    print(f"checks: {len(report.failures)} failed", flush=True)
    copy = math.nan

    def ceilings() -> None:
        nonlocal copy
        copy = measure_ceilings(report)

    attempt(report, "ceilings", ceilings)
    attempt(report, "decodes", lambda: measure_decodes(ops, report, copy))
    attempt(report, "prompts", lambda: measure_prompts(ops, report))
    attempt(report, "torch", lambda: measure_torch(report))
    attempt(report, "engine", lambda: gpu_engine.run(report))
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": report.rows, "failures": report.failures}, indent=1))
    print("\n".join([*report.failures, "FAILED" if report.failures else "passed"]))
    return 1 if report.failures else 0


def try_on_host() -> int:
    """Runs the checks on small cases without a GPU, from a checkout: what fails on one is then the GPU's."""
    global DEVICE, HEAD_DIMS
    sys.path.append(str(Path(__file__).parent.parent / "tests" / "cuda_host"))
    from host_device import HostDevice

    DEVICE, HEAD_DIMS = torch.device("cpu"), (64, 128)
    torch.manual_seed(1)
    ops, report = CudaOps(HostDevice()), Report(math.inf)
    with torch.inference_mode():
        check_attention(ops, report, ([(1, 20), (1, 90), (9, 40)],))
        check_bulk(ops, report, [(1, 20), (1, 90)])
        check_rows(ops, report)
        check_sample(ops, report, vocab_size=1000)
        check_graph(ops, report, head_dim=64)
    print("\n".join([*report.failures, "FAILED" if report.failures else "passed, without a GPU"]))
    return 1 if report.failures else 0


def attempt(report: Report, name: str, work: Callable[[], None]) -> None:
    """Does one part; what it raises is a failure, and the other parts are done all the same."""
    try:
        with torch.inference_mode():
            work()
            torch.cuda.synchronize()
    except Exception:
        report.failures.append(f"{name} raised:\n{traceback.format_exc()[-1500:]}")


if __name__ == "__main__":
    sys.exit(main())
