"""What a step brought about, as plain data: what the engine sends to the caller's side.

`Engine` makes it, `Streams` reads it; neither needs the other, and this module needs no torch.
"""

from dataclasses import dataclass
from typing import Final

# States of a row after a commit, and reasons of a sequence that ended outside one.
RUNNING: Final = 0
STOP: Final = 1
LENGTH: Final = 2
ABORT: Final = 3
ERROR: Final = 4


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
class StepEvents:
    """What one step brought about. The first lists have one entry per sampled row.

    Attributes:
        request_ids: the core's ids.
        sample_idxs: which of the request's n samples.
        num_cached_tokens: prompt tokens that were found in the cache.
        token_ids: what was sampled.
        states: RUNNING, STOP or LENGTH. Tokens and states of the rows of beams mean nothing.
        logprobs: of the rows that asked, by row.
        ended: (request id, sample index, reason) of sequences that ended outside a commit.
        answers: of the beam searches that ended, by the core's id of the request.
        error: why the step before failed, where a reason is ERROR.
        started_s: when the step began, in seconds of `time.monotonic`.
        finished_s: when it was committed.
    """

    request_ids: list[int]
    sample_idxs: list[int]
    num_cached_tokens: list[int]
    token_ids: list[int]
    states: list[int]
    logprobs: RowLogprobs | None
    ended: list[tuple[int, int, int]]
    answers: list[tuple[int, list[BeamAnswer]]]
    error: str | None
    started_s: float
    finished_s: float
