"""One engine in a process of its own: reads a run a line from standard input, answers with a line of JSON.

`worker.py ENGINE OPTIONS-AS-JSON` runs in the engine's environment. The first line of output has the seconds
from the start of the process to the first token.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)

from engines.contract import EngineProtocol, Options, Result  # noqa: E402
from workloads import WORKLOADS, Job, warm_up  # noqa: E402


def _process_start() -> float:
    """When this process was started, as `time.time` counts."""
    fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    boot = next(
        int(line.split()[1])
        for line in Path("/proc/stat").read_text().splitlines()
        if line.startswith("btime")
    )
    return boot + int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _run(engine: EngineProtocol, jobs: Sequence[Job]) -> Result:
    if engine.shares_at_once or len(jobs) == 1:
        return engine.run(jobs)
    first, rest = engine.run(jobs[:1]), engine.run(jobs[1:])
    return Result(first.first_token_s, first.num_tokens + rest.num_tokens)


def main() -> None:
    """Serves runs until standard input ends."""
    # Engines print what they like; only this file's lines go to the real standard output.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    given = json.loads(sys.argv[2])
    options = Options(**{**given, "peers": Path(given["peers"])})
    engine: EngineProtocol = importlib.import_module(f"engines.{sys.argv[1]}").Engine(options)
    engine.run(warm_up())
    print(json.dumps({"start_s": time.time() - _process_start()}), file=answers)
    try:
        for line in sys.stdin:
            order = json.loads(line)
            jobs = WORKLOADS[order["work"]](order["run"])
            shares = order["work"] == "W3"
            began = time.perf_counter()
            result = _run(engine, jobs) if shares else engine.run(jobs)
            seconds = time.perf_counter() - began
            answer = {
                "seconds": seconds,
                "first_token_s": result.first_token_s,
                "num_tokens": result.num_tokens,
            }
            print(json.dumps(answer), file=answers)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
