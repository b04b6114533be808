"""What a request gives back: plain data, the same from `LLM`, `AsyncLLM` and the server."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class Logprob:
    """The log-probability of one token, of the model's own distribution: before temperature and filters.

    Attributes:
        logprob: natural logarithm.
        rank: 1 for the most likely token. None for a sampled token that is not among the ones asked for.
        decoded_token: the token as text; None with `detokenize=False`.
    """

    logprob: float
    rank: int | None
    decoded_token: str | None


# One dict per generated token: the sampled token first, then the most likely ones that were asked for.
TokenLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt, as far as it has come.

    Attributes:
        index: which of the n answers.
        text: the text so far; it only grows. Text that may turn out to be part of a stop string is held back.
            Empty with `detokenize=False`.
        token_ids: the generated tokens, with the one that ended the answer. Where a stop string ended it, up
            to the token that completed the stop string.
        finish_reason: "stop", "length" or "abort"; None while it goes on.
        stop_reason: the stop string, or the id from stop_token_ids, that ended the answer; None otherwise.
        logprobs: one entry per token of token_ids, or None where not asked for.
        cumulative_logprob: sum of the logarithms over the generated tokens, or None where not asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class SampleChange:
    """What is new of one answer since the last change. The changes of an answer add up to its output.

    Attributes:
        index: which of the n answers.
        text: the new text; may be empty, as after the first half of a character.
        token_ids: the new tokens; may be empty, as when held-back text comes at the end.
        logprobs: one entry per new token, or None where not asked for.
        finish_reason: "stop", "length" or "abort" in the last change of the answer, None before.
        stop_reason: as in `CompletionOutput`.
        text_offsets: per new token, where in the whole text it begins; all parts of a character begin where
            it begins. None where logprobs is, and with `detokenize=False`.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    text_offsets: list[int] | None = None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened, in seconds of `time.monotonic`.

    Attributes:
        arrival_time: the request came, before its prompt was encoded.
        first_scheduled_time: the step that gave its first token began. (A prompt longer than a step began
            earlier.)
        first_token_time: its first token was there.
        last_token_time: its newest token was there, of whichever answer.
        finished_time: its last token was there, or it was aborted.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers, as far as they have come.

    Attributes:
        request_id: as the caller named it, or a number of the engine's own.
        prompt: the prompt as text, where it was given as text.
        prompt_token_ids: the prompt as the model reads it.
        outputs: n answers, in order.
        finished: no answer goes on.
        num_cached_tokens: tokens of the prompt whose keys and values were found in the cache.
        metrics: times.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
