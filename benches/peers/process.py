"""A worker process that can be put to sleep: several loaded engines share a machine without disturbing."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# How long an engine is awake before each of its runs, as one that waits for requests is. Stopped, it cannot
# do what engines do between requests, such as to let threads that spin go to sleep, or to make memory ready.
AWAKE_S = 0.8


class WorkerDied(RuntimeError):
    """The worker ended or answered too late; its log says why."""


class Worker:
    """One engine in a process group of its own, asleep except while it runs something."""

    def __init__(
        self,
        engine: str,
        python: Path,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        """Starts the engine and waits for its first token. Raises WorkerDied."""
        self.engine = engine
        self._log = log
        self._process = subprocess.Popen(
            [str(python), str(HERE / "engines" / "worker.py"), engine, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        self.start_s: float = self._read()["start_s"]
        self._signal(signal.SIGSTOP)

    def run(self, work: str, run: int) -> dict[str, float]:
        """Wakes the engine for one run. Adds to its answer how many cores others used meanwhile."""
        self._signal(signal.SIGCONT)
        time.sleep(AWAKE_S)
        try:
            busy, own, began = _busy_s(), self._cpu_s(), time.perf_counter()
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"work": work, "run": run}) + "\n")
            self._process.stdin.flush()
            answer = self._read()
            seconds = time.perf_counter() - began
            others = (_busy_s() - busy) - (self._cpu_s() - own)
            return {**answer, "others": max(0.0, others / seconds)}
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Ends the process group."""
        self._signal(signal.SIGCONT)
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        self._signal(signal.SIGKILL)

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerDied(f"{self.engine} ended, see {self._log}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _cpu_s(self) -> float:
        """CPU seconds that the process group has used."""
        ticks = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rsplit(")", 1)[1].split()
            except (OSError, IndexError):
                continue  # It ended meanwhile.
            if int(fields[2]) == self._process.pid:
                ticks += int(fields[11]) + int(fields[12])
        return ticks * TICK_S


def _busy_s() -> float:
    """CPU seconds that the whole machine has spent working, time taken by its host included."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) * TICK_S
