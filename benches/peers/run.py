"""Runs the same workloads on pagedkv and on the engines that are installed, in turn, and compares.

`python benches/peers/run.py DIR`, DIR being where setup.sh put the engines; pagedkv is taken from the
environment that runs this file. All engines are loaded first and sleep while another one runs; in every round
each takes its turn with the same tokens, so that what the machine does to one it does to its neighbour.
Figures are medians, ratios are medians of the rounds' ratios. What the machine reads and multiplies at
most is measured before each round, since one that is shared changes. Nothing is installed.
"""

import argparse
import json
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagedkv import _core
from pagedkv.config import MAX_THREADS
from process import Worker, WorkerDied
from report import SUBJECT, Figure, chart, table
from workloads import WORKLOADS

PEERS = ("vllm", "openvino", "llama", "transformers")
# What oneDNN, which multiplies for vLLM, OpenVINO and transformers, calls an option of pagedkv.
ONEDNN_ISAS = {
    "avx512_bf16": "AVX512_CORE_BF16",
    "avx512": "AVX512_CORE_VNNI",
    "avx2": "AVX2",
}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="where setup.sh installed the engines")
    parser.add_argument("--engines", default=",".join((SUBJECT, *PEERS)), help="names, separated by commas")
    parser.add_argument(
        "--works", default=",".join(WORKLOADS), help="of W1, W2, W3, W4; start is measured always"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--no-prefix-cache", action="store_true")
    parser.add_argument(
        "--cpu-isa",
        choices=("auto", *ONEDNN_ISAS),
        default="auto",
        help="all that pagedkv and oneDNN may use",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="every run, as JSON")
    parser.add_argument("--chart", type=Path, help="a bar chart, as SVG")
    parsed = parser.parse_args(argv)
    if not 1 <= parsed.threads <= MAX_THREADS:
        parser.error(f"--threads is {parsed.threads}, allowed: 1..{MAX_THREADS}")
    for work in parsed.works.split(","):
        if work not in WORKLOADS:
            parser.error(f"--works has {work!r}, allowed: {', '.join(WORKLOADS)}")
    for engine in parsed.engines.split(","):
        if engine not in (SUBJECT, *PEERS):
            parser.error(f"--engines has {engine!r}, allowed: {', '.join((SUBJECT, *PEERS))}")
    return parsed


def _python(engine: str, directory: Path) -> Path:
    return Path(sys.executable) if engine == SUBJECT else directory / engine / "bin" / "python"


def _environment(engine: str, directory: Path, threads: int, cpu_isa: str) -> dict[str, str]:
    """What the engine's own documentation asks for, and what oneDNN may use."""
    environment = {"HF_HUB_OFFLINE": "1"}
    if cpu_isa != "auto":
        environment["ONEDNN_MAX_CPU_ISA"] = ONEDNN_ISAS[cpu_isa]
    if engine == "vllm":
        libraries = [
            *Path("/usr/lib/x86_64-linux-gnu").glob("libtcmalloc_minimal.so.4"),
            *(directory / "vllm" / "lib").glob("libiomp5.so"),
        ]
        environment["LD_PRELOAD"] = ":".join(map(str, libraries))
        environment["OMP_NUM_THREADS"] = str(threads)
        # This version cannot load its own ahead-of-time cache and would compile anew at every start.
        environment["VLLM_USE_AOT_COMPILE"] = "0"
    return environment


def _start(parsed: argparse.Namespace, engine: str) -> Worker | None:
    directory = parsed.directory.resolve()
    if not _python(engine, directory).exists():
        print(f"{engine} is not installed in {directory}: left out", file=sys.stderr)
        return None
    options = {
        "peers": str(directory),
        "dtype": parsed.dtype,
        "prefix_cache": not parsed.no_prefix_cache,
        "threads": parsed.threads,
        "cpu_isa": parsed.cpu_isa,
    }
    log = directory / "logs" / f"{engine}.log"
    log.parent.mkdir(exist_ok=True)
    try:
        worker = Worker(
            engine,
            _python(engine, directory),
            options,
            _environment(engine, directory, parsed.threads, parsed.cpu_isa),
            log,
        )
    except WorkerDied as death:
        print(f"{death}: left out", file=sys.stderr)
        return None
    print(f"{engine}: first token {worker.start_s:.1f} s after the start of its process", file=sys.stderr)
    return worker


def _measure(parsed: argparse.Namespace, workers: Sequence[Worker]) -> list[dict[str, Any]]:
    """One entry per run. Which engine begins changes from round to round; the first round is not counted."""
    runs: list[dict[str, Any]] = []
    for work in parsed.works.split(","):
        for number in range(parsed.rounds + (work == "W1")):
            machine = _core.cpu_ceilings()
            rates = [rate for name, rate in machine.items() if name != "read"]
            products = machine.get(parsed.cpu_isa, max(rates, default=0.0))
            print(
                f"{work} round {number}: the machine reads {machine['read'] / 1e9:.1f} GB/s"
                f" and multiplies {products / 1e9:,.0f} GFLOP/s",
                file=sys.stderr,
            )
            shift = number % len(workers)
            for worker in (*workers[shift:], *workers[:shift]):
                answer = worker.run(work, number)
                counts = not (work == "W1" and number == 0)
                run = {"engine": worker.engine, "work": work, "round": number, "counts": counts}
                runs.append({**run, "machine": machine, **answer})
                print(
                    f"{work} round {number} {worker.engine}: {answer['seconds']:.2f} s,"
                    f" first token {answer['first_token_s'] * 1e3:.0f} ms,"
                    f" others used {answer['others']:.2f} cores",
                    file=sys.stderr,
                )
    return runs


def _figures(workers: Sequence[Worker], runs: Sequence[dict[str, Any]]) -> list[Figure]:
    values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for worker in workers:
        values["start s"][worker.engine].append(worker.start_s)
    for run in runs:
        if not run["counts"]:
            continue
        if run["work"] == "W1":
            decode_s = run["seconds"] - run["first_token_s"]
            values["W1 first token ms"][run["engine"]].append(run["first_token_s"] * 1e3)
            values["W1 decode tokens/s"][run["engine"]].append((run["num_tokens"] - 1) / decode_s)
        else:
            values[f"{run['work']} s"][run["engine"]].append(run["seconds"])
    return [Figure(name, name.endswith("tokens/s"), engines) for name, engines in values.items()]


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table; writes runs and chart where asked."""
    parsed = _arguments(argv)
    _core.set_num_threads(parsed.threads)
    # Whoever ends this process ends its workers, which would sleep on otherwise.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    workers = [worker for engine in parsed.engines.split(",") if (worker := _start(parsed, engine))]
    try:
        figures = _figures(workers, runs := _measure(parsed, workers))
    finally:
        for worker in workers:
            worker.close()
    print(table(figures, [worker.engine for worker in workers]))
    if parsed.json:
        parsed.json.write_text(json.dumps(runs, indent=1))
    if parsed.chart:
        parsed.chart.write_text(chart(figures))


if __name__ == "__main__":
    main()
