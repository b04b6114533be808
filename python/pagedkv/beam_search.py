"""What a beam search is asked and what it answers. Named and defaulted as vLLM's users know it.

The search itself is the core's (`rust/sched/beam_search.rs`); its rules are those of `transformers`.
"""

from dataclasses import dataclass, field
from typing import Final, Literal

from pagedkv.checks import check_bool, check_float, check_int, refusal
from pagedkv.errors import InvalidRequest
from pagedkv.outputs import FinishReason
from pagedkv.sampling_params import MAX_SAMPLES, CachePriority, SamplingParams

MAX_LENGTH_PENALTY: Final = 5.0
EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True)
class BeamSearchParams:
    """The options of one beam search.

    Raises InvalidRequest (a ValueError), naming the field, its value and what is allowed.

    Attributes:
        beam_width: beams that go on after every token, and answers; at most 128.
        max_tokens: tokens to generate at most. None: as many as the model's length leaves room for.
        ignore_eos: go on after the model's end tokens.
        temperature: 0 or 1, which mean the same: the log-probabilities are the model's own.
        length_penalty: an answer's score is the sum of its log-probabilities, divided by its length (with the
            end token) to this power; -5 to 5. Above 0 longer answers win, below 0 shorter ones.
        early_stopping: when the search ends, once it has beam_width answers. True: at once. False: when the
            best beam scores no better at its present length than the worst of them. "never": when it could
            not do so at any length either.
        skip_special_tokens: leave special tokens out of the text of a completion.
        include_stop_str_in_output: leave the end token in the text of a completion.
        cache_priority: as in `SamplingParams`.
    """

    beam_width: int
    max_tokens: int | None = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    cache_priority: CachePriority = "normal"

    def __post_init__(self) -> None:
        check_int(
            InvalidRequest, "beam_width", self.beam_width, 1, MAX_SAMPLES, f"an integer in 1..{MAX_SAMPLES}"
        )
        if isinstance(self.temperature, bool) or self.temperature not in (0, 1):
            raise refusal(
                InvalidRequest,
                "temperature",
                self.temperature,
                "0 or 1, which change nothing in a beam search",
            )
        low, high = -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        check_float(InvalidRequest, "length_penalty", self.length_penalty, low, high, "a number in -5..5")
        if self.early_stopping not in (True, False, "never") or type(self.early_stopping) not in (bool, str):
            raise refusal(InvalidRequest, "early_stopping", self.early_stopping, 'true, false or "never"')
        check_bool(InvalidRequest, "ignore_eos", self.ignore_eos)
        _ = self.as_sampling()

    @property
    def for_core(self) -> tuple[int, float, bool | None]:
        """Width, length penalty and early stopping as the core takes them; None is "never" there."""
        stops_early = None if isinstance(self.early_stopping, str) else self.early_stopping
        return self.beam_width, float(self.length_penalty), stops_early

    def as_sampling(self) -> SamplingParams:
        """What the answers have in common with drawn ones. Raises InvalidRequest."""
        return SamplingParams(
            n=self.beam_width,
            temperature=0.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            cache_priority=self.cache_priority,
        )


@dataclass(slots=True)
class BeamSearchSequence:
    """One answer of a beam search.

    Attributes:
        tokens: the prompt and the generated tokens, with the end token.
        text: all of the tokens as text, special ones too.
        cum_logprob: sum of the log-probabilities of the generated tokens.
        score: the same, divided by their number to the power of the length penalty.
        finish_reason: "stop" at an end token, "length" otherwise.
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    score: float
    finish_reason: FinishReason


@dataclass(slots=True)
class BeamSearchOutput:
    """The answers to one prompt.

    Attributes:
        sequences: as many as the search was wide, the best score first; none if it was aborted.
        prompt_token_ids: the prompt as the model reads it.
        num_cached_tokens: tokens of the prompt that were found in the cache.
    """

    sequences: list[BeamSearchSequence] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
