"""Replays a trace through the real core, with nothing computed: every row samples the same token.

One request at a time, a replay says what the prefix cache of a given size finds; so policies are compared
with published figures, which count whole blocks of prompts. With a `Timing`, requests arrive when the trace
says and generate their outputs, in virtual time.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagedkv import _core
from pagedkv.bench import arena as arenas
from pagedkv.bench.trace import SAMPLED, TraceRequest

# Points of a curve, about.
_NUM_POINTS = 500
_MAX_QUEUED = 1 << 14


@dataclass(frozen=True)
class Timing:
    """What a step may hold, and how long it takes: `step_s`, and `token_s` for each of its tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    step_s: float
    token_s: float


@dataclass(frozen=True)
class Point:
    """Blocks at one moment: held by requests, and idle with findable contents."""

    at: float
    owned: int
    idle: int


@dataclass
class Outcome:
    """What a replay counted. `points` are in requests, or in seconds of virtual time."""

    policy: str
    blocks: int
    hit_tokens: int = 0
    prompt_tokens: int = 0
    evictions: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    refused: int = 0
    points: list[Point] = field(default_factory=list)

    @property
    def token_hit_ratio(self) -> float:
        """Prompt tokens found in whole blocks, of all prompt tokens."""
        return self.hit_tokens / max(self.prompt_tokens, 1)

    def as_json(self) -> dict[str, Any]:
        """The fields that are written to a file."""
        return {
            "policy": self.policy,
            "blocks": self.blocks,
            "token_hit_ratio": self.token_hit_ratio,
            "evictions": self.evictions,
            "preemptions": self.preemptions,
            "seconds": self.seconds,
        }


class _Replay:
    """A core and what it has found so far."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        policy: str,
        num_blocks: int,
        block_size: int,
        timing: Timing | None,
    ) -> None:
        longest = max((request.input_len for request in requests), default=1)
        outputs = max((request.output_len for request in requests), default=1) if timing else 1
        self.core = _core.Core(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=timing.max_num_seqs if timing else 1,
            max_num_batched_tokens=timing.max_num_batched_tokens if timing else longest,
            max_model_len=longest + outputs,
            # Published figures count whole blocks, in a cache that keeps nothing else.
            partial_matching=False,
            eviction=policy,
            max_queued_requests=_MAX_QUEUED,
        )
        self.edge = self.core.edge
        self.arena = np.zeros(self.core.arena_len, np.int32)
        self.block_size = block_size
        self.outcome = Outcome(
            policy, num_blocks, prompt_tokens=sum(request.input_len for request in requests)
        )
        # Requests whose prompt is not computed yet.
        self.new: set[int] = set()
        self.num_live = 0
        self.next_point = 0.0

    def submit(self, request: TraceRequest, num_outputs: int) -> bool:
        """Queues a request. Returns False where too many are in flight."""
        try:
            request_id = self.edge.submit(request.prompt(), max_tokens=num_outputs, ignore_eos=True)
        except _core.InvalidRequest:
            self.outcome.refused += 1
        except _core.QueueFull:
            return False
        else:
            self.new.add(request_id)
            self.num_live += 1
        return True

    def step(self, now: float, every: float) -> int:
        """Runs one step and returns its number of tokens; 0 where nothing can run.

        Adds a point to the curve, at `now`, once in every `every`.
        """
        header = self.core.schedule(self.arena)
        if header is None or header.num_tokens == 0:
            return 0
        if self.new:
            self._count_hits()
        if now >= self.next_point:
            stats = self.edge.stats()
            self.outcome.points.append(Point(now, stats["blocks_owned"], stats["blocks_idle"]))
            self.next_point = now + every
        states = self.core.commit(header.step_id, np.full(header.num_rows, SAMPLED, np.int32))
        self.num_live -= int(np.count_nonzero(states))
        return header.num_tokens

    def _count_hits(self) -> None:
        for low, high, _, num_cached in arenas.rows(self.arena).tolist():
            request_id = (high & 0xFFFF_FFFF) << 32 | (low & 0xFFFF_FFFF)
            if request_id in self.new:
                self.new.remove(request_id)
                self.outcome.hit_tokens += num_cached - num_cached % self.block_size

    def finish(self) -> Outcome:
        stats = self.edge.stats()
        self.outcome.evictions, self.outcome.preemptions = stats["evictions"], stats["preemptions"]
        return self.outcome


def run(
    requests: Sequence[TraceRequest],
    policy: str,
    num_blocks: int,
    block_size: int,
    timing: Timing | None = None,
) -> Outcome:
    """Replays a trace with one eviction policy and pool size.

    Raises:
        ValueError: The core refuses a size; the message names it and what is allowed.
    """
    start = time.perf_counter()
    replay = _Replay(requests, policy, num_blocks, block_size, timing)
    if timing is None:
        _one_at_a_time(replay, requests)
    else:
        _in_time(replay, requests, timing)
    outcome = replay.finish()
    outcome.seconds = time.perf_counter() - start
    return outcome


def _one_at_a_time(replay: _Replay, requests: Sequence[TraceRequest]) -> None:
    every = len(requests) / _NUM_POINTS
    for number, request in enumerate(requests):
        replay.submit(request, 1)
        while replay.step(number, every):
            pass


def _in_time(replay: _Replay, requests: Sequence[TraceRequest], timing: Timing) -> None:
    every = (requests[-1].time_s if requests else 0.0) / _NUM_POINTS
    pending = deque(requests)
    now = 0.0
    while pending or replay.num_live:
        if pending and not replay.num_live:
            now = max(now, pending[0].time_s)
        while pending and pending[0].time_s <= now and replay.submit(pending[0], pending[0].output_len):
            pending.popleft()
        num_tokens = replay.step(now, every)
        now += timing.step_s + num_tokens * timing.token_s
