"""`python -m pagedkv.bench replay | core | sharing | where`: the command line of the benchmarks."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagedkv import config
from pagedkv.bench import core, plot, replay, trace

POLICIES = ("lru", "turn")


def _policies(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in POLICIES:
            raise argparse.ArgumentTypeError(f"policy is {name!r}; allowed: {', '.join(POLICIES)}")
    return names


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: a whole number above 0")
    return int(text)


def _positives(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _positive_float(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; allowed: a number above 0")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line of the benchmarks."""
    result = argparse.ArgumentParser(prog="python -m pagedkv.bench", description=__doc__)
    commands = result.add_subparsers(dest="command", required=True)

    replays = commands.add_parser(
        "replay",
        help="replay a trace through the core and count what the prefix cache found",
        description="Replays a trace through the core, without a model. By default one request at a time, its"
        " prompt only; with --concurrent requests arrive when the trace says and generate their outputs, in"
        " virtual time. A hit counts in whole blocks.",
    )
    replays.add_argument("trace", type=Path, help="Mooncake trace (.jsonl) or Azure lengths (.csv)")
    replays.add_argument("--policy", type=_policies, default=list(POLICIES), metavar="NAMES", help="lru,turn")
    replays.add_argument(
        "--blocks",
        type=_positives,
        default=[1000, 2000, 4000, 8000, 16000],
        metavar="SIZES",
        help="pool sizes",
    )
    replays.add_argument(
        "--block-size", type=_positive, default=512, metavar="N", help="tokens (default: 512)"
    )
    replays.add_argument("--limit", type=_positive, metavar="N", help="replay the first N requests only")
    replays.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    replays.add_argument(
        "--plot", type=Path, metavar="FILE", help="write an SVG of blocks in use over time here"
    )
    together = replays.add_argument_group("with --concurrent")
    together.add_argument(
        "--concurrent", action="store_true", help="replay arrivals and outputs in virtual time"
    )
    together.add_argument("--max-num-seqs", type=_positive, default=256, metavar="N", help="default: 256")
    together.add_argument(
        "--max-num-batched-tokens", type=_positive, default=8192, metavar="N", help="default: 8192"
    )
    together.add_argument(
        "--step-ms", type=_positive_float, default=10.0, metavar="MS", help="time of a step (default: 10)"
    )
    together.add_argument(
        "--tokens-per-s",
        type=_positive_float,
        default=50_000.0,
        metavar="N",
        help="rate of computing tokens, whose time a step takes besides (default: 50000)",
    )

    steps = commands.add_parser("core", help="time schedule and commit for sequences that decode")
    steps.add_argument("--json", type=Path, metavar="FILE", help="write the results here")

    shares = commands.add_parser(
        "sharing",
        help="samples and beams of one prompt beside the same work as separate requests",
        description="Runs a model: 16 samples of a prompt as one request, and a beam search of width 8,"
        " beside as many separate requests with and without the prefix cache.",
    )
    shares.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    shares.add_argument("--plot", type=Path, metavar="FILE", help="write an SVG of the results here")
    shares.add_argument(
        "--prompt-len", type=_positive, default=512, metavar="N", help="tokens of the prompt (default: 512)"
    )
    shares.add_argument(
        "--max-tokens", type=_positive, default=64, metavar="N", help="tokens of each answer (default: 64)"
    )
    shares.add_argument(
        "--rounds", type=_positive, default=1, metavar="N", help="the quickest of N runs counts (default: 1)"
    )
    config.add_cli_options(shares)
    parts = commands.add_parser(
        "where", help="say where the time of a run with a model goes, beside its floors"
    )
    parts.add_argument(
        "--model", metavar="MODEL", help="directory, GGUF file or name (default: the demo model)"
    )
    parts.add_argument("--dtype", default="auto", help="default: auto")
    parts.add_argument("--cpu-isa", choices=config.CPU_ISAS, default="auto", help="default: auto")
    parts.add_argument(
        "--workload",
        action="append",
        choices=("crowd", "single", "shared", "samples"),
        help="may be repeated (default: all)",
    )
    parts.add_argument(
        "--no-prefix-cache", action="store_true", help="compute what prompts have in common for each of them"
    )
    parts.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    return result


def _write(path: Path | None, results: list[dict[str, Any]]) -> None:
    if path is not None:
        path.write_text(json.dumps(results, indent=1) + "\n")


def _replay(options: argparse.Namespace) -> None:
    requests = trace.read(options.trace)[: options.limit]
    timing = None
    if options.concurrent:
        timing = replay.Timing(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            step_s=options.step_ms / 1e3,
            token_s=1 / options.tokens_per_s,
        )
    print(
        f"{options.trace.name}: {len(requests)} requests, {sum(r.input_len for r in requests)} prompt tokens"
    )
    print(
        f"{'policy':8}{'blocks':>8}{'hit ratio':>11}{'evictions':>11}"
        f"{'preemptions':>13}{'in use':>8}{'seconds':>9}"
    )
    results, curves = [], []
    for num_blocks in options.blocks:
        for policy in options.policy:
            outcome = replay.run(requests, policy, num_blocks, options.block_size, timing)
            results.append(outcome.as_json())
            curves.append(outcome)
            peak = max((point.owned for point in outcome.points), default=0)
            print(
                f"{policy:8}{num_blocks:8}{outcome.token_hit_ratio:11.4f}{outcome.evictions:11}"
                f"{outcome.preemptions:13}{peak:8}{outcome.seconds:9.2f}"
            )
            if outcome.refused:
                print(
                    f"{'':8}{outcome.refused} requests need more blocks than there are;"
                    " their tokens count as missed"
                )
    _write(options.json, results)
    if options.plot is not None:
        label = "virtual time in s" if options.concurrent else "requests"
        options.plot.write_text(plot.blocks_in_use(curves, label))


def _sharing(options: argparse.Namespace) -> None:
    # torch is imported for the one benchmark that computes.
    from pagedkv.bench import bars, sharing

    engine = config.from_cli(options)
    outcomes = sharing.run(engine, options.prompt_len, options.max_tokens, options.rounds)
    _write(options.json, sharing.as_json(outcomes))
    if options.plot is not None:
        options.plot.write_text(bars.sharing(outcomes))


def _where(options: argparse.Namespace) -> None:
    # Imported here, because it needs torch, which the others do without.
    from pagedkv.bench import where

    results = where.run(
        options.model,
        options.dtype,
        options.cpu_isa,
        options.workload or where.WORKLOADS,
        prefix_cache=not options.no_prefix_cache,
    )
    _write(options.json, results)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark. Returns the exit status: 2 where a trace or model cannot be used."""
    options = parser().parse_args(argv)
    if options.command == "core":
        _write(options.json, core.run())
        return 0
    try:
        if options.command == "sharing":
            _sharing(options)
        elif options.command == "where":
            _where(options)
        else:
            _replay(options)
    except (OSError, ValueError) as error:
        print(f"python -m pagedkv.bench: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
