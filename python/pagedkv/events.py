"""What a step brought about, as plain data: what the engine sends to the caller's side.

The core reports events through a ring, and `Engine` says with a `StepReport` that those of a step are there.
`Streams` reads both; neither needs the other, and this module needs no torch.
"""

from dataclasses import dataclass, field
from typing import Final

# States of a sample after an event.
RUNNING: Final = 0
STOP: Final = 1
LENGTH: Final = 2
ABORT: Final = 3
ERROR: Final = 4
# What a commit says of a row whose sequence had ended before: there is no event of it.
VOID: Final = -1

# What happened to one sample: the core's id of its request, row of the step, sample index, token id, state,
# prompt tokens that were found in the cache. Row and token are -1 where a sequence ended outside a commit.
Event = tuple[int, int, int, int, int, int]
NO_TOKEN: Final = -1


@dataclass(slots=True)
class RowLogprobs:
    """Log-probabilities of the rows that asked for them.

    Attributes:
        index: row of the step -> entry of the lists below.
        chosen: of the sampled token.
        top_ids: the most likely tokens, as many as the greediest row asked for.
        top: their log-probabilities.
    """

    index: dict[int, int]
    chosen: list[float]
    top_ids: list[list[int]]
    top: list[list[float]]


@dataclass(slots=True)
class BeamAnswer:
    """An answer of a beam search: tokens, the sum of their log-probabilities, the score, STOP or LENGTH."""

    token_ids: list[int]
    cum_logprob: float
    score: float
    reason: int


@dataclass(slots=True)
class StepReport:
    """Announces the events of a step, and says what they have in common.

    Attributes:
        step_id: the core's number of the step; no other report has the same. Requests that ended outside a
            commit, while it was the oldest step in flight, are announced with it.
        num_events: how many there are.
        logprobs: of the rows that asked, by row.
        error: what the last step that failed raised, for events whose state is ERROR.
        started_s: when the step began, in seconds of `time.monotonic`.
        finished_s: when it was committed.
        answers: of the beam searches that ended, by the core's id of the request.
    """

    step_id: int
    num_events: int
    logprobs: RowLogprobs | None
    error: Exception | None
    started_s: float
    finished_s: float
    answers: list[tuple[int, list[BeamAnswer]]] = field(default_factory=list)
