"""How a request is to be sampled, and where its answer ends. Named and defaulted as vLLM's users know it.

What a checkpoint's generation_config.json recommends (a temperature, a top_p) is not applied: what is not
given here has the default below, for every model. Only its end-of-sequence tokens are heeded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from pagedkv.checks import check_bool, check_float, check_int, refusal
from pagedkv.errors import InvalidRequest
from pagedkv.text.stop import StopStrings

MAX_SAMPLES: Final = 128
MAX_LOGPROBS: Final = 20
MAX_TEMPERATURE: Final = 100.0
MAX_SEED: Final = 2**64 - 1
MAX_TOKEN_ID: Final = 2**31 - 1
MIN_PRIORITY: Final = -(2**31)
MAX_PRIORITY: Final = 2**31 - 1

CachePriority = Literal["normal", "low"]
"""What the blocks of a request are worth once it has ended."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling options of one request.

    Raises InvalidRequest (a ValueError), naming the field, its value and what is allowed.

    Attributes:
        n: answers to the same prompt, which is computed once; at most 128.
        best_of: answers to draw, of which the n best are given, by the mean of their log-probabilities;
            nothing shows before all have ended. None: n.
        temperature: 0 takes the most likely token always (the lowest id among equals); up to 100.
        top_p: keep the most likely tokens whose probabilities add up to this; 1 keeps all.
        top_k: keep this many of the most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this likely, relative to the most likely one; 0 keeps all.
        seed: makes the answer repeatable, whatever else the engine serves. None: drawn at submit; -1 becomes
            None.
        max_tokens: tokens to generate at most. None: as many as the model's length leaves room for.
        stop: texts that end the answer; they are not part of it.
        stop_token_ids: tokens that end the answer, besides the model's own end tokens.
        ignore_eos: go on after the model's end tokens.
        logprobs: log-probabilities of the generated tokens. 0: only theirs; k: of the k most likely tokens as
            well.
        detokenize: make the text. False: `text` stays empty, tokens and log-probabilities are given by their
            ids alone, and stop strings, which are looked for in the text, are refused. Over HTTP answers are
            texts, so requests there have no such field.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: leave the stop text, or the token that ended the answer, in the text.
        cache_priority: "low" has the blocks that the request computes evicted first once it has ended, unless
            another request, or another answer of this one, uses them as well: for what will not come again.
            There is no "high": what shall stay is pinned.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    cache_priority: CachePriority = "normal"

    def __post_init__(self) -> None:
        self._check_int("n", 1, MAX_SAMPLES, f"an integer in 1..{MAX_SAMPLES}")
        if self.best_of is not None:
            allowed = f"an integer in {self.n} (n)..{MAX_SAMPLES}, or none for n"
            self._check_int("best_of", self.n, MAX_SAMPLES, allowed)
        self._check_float("temperature", MAX_TEMPERATURE, "a number in 0..100")
        self._check_float("top_p", 1.0, "a number p with 0 < p <= 1")
        if self.top_p == 0:
            raise refusal(InvalidRequest, "top_p", self.top_p, "a number p with 0 < p <= 1")
        self._check_int("top_k", -1, MAX_TOKEN_ID, "-1 or 0 (off), or an integer >= 1")
        self._check_float("min_p", 1.0, "a number in 0..1")
        if self.seed is not None:
            self._check_int("seed", -1, MAX_SEED, "an integer in 0..2^64-1, or none or -1 for a random one")
        if self.max_tokens is not None:
            self._check_int("max_tokens", 1, None, "an integer >= 1, or none for what the context leaves")
        if self.logprobs is not None:
            self._check_int("logprobs", 0, MAX_LOGPROBS, f"an integer in 0..{MAX_LOGPROBS}, or none")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            check_bool(InvalidRequest, name, getattr(self, name))
        if self.cache_priority not in ("normal", "low"):
            raise refusal(InvalidRequest, "cache_priority", self.cache_priority, '"normal" or "low"')
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        if self.stop and not self.detokenize:
            raise refusal(InvalidRequest, "stop", self.stop, "none where detokenize is false")
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))

    def _check_int(self, field: str, low: int, high: int | None, allowed: str) -> None:
        check_int(InvalidRequest, field, getattr(self, field), low, high, allowed)

    def _check_float(self, field: str, high: float, allowed: str) -> None:
        check_float(InvalidRequest, field, getattr(self, field), 0.0, high, allowed)

    @property
    def num_samples(self) -> int:
        """Answers that are drawn."""
        return self.n if self.best_of is None else self.best_of

    @cached_property
    def stop_strings(self) -> StopStrings | None:
        """`stop`, made ready for the search; all answers to these parameters share it. None for no stops.

        It is made when first asked for, in milliseconds per thousand characters, and goes when the parameters
        go.
        """
        return StopStrings(self.stop) if self.stop else None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids`, always as a tuple."""
        return tuple(self.stop_token_ids or ())


def _stop_strings(value: object) -> tuple[str, ...]:
    allowed = "a text or a list of texts, none of them empty"
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, Sequence) or not all(isinstance(text, str) and text for text in value):
        raise refusal(InvalidRequest, "stop", value, allowed)
    return tuple(value)


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise refusal(InvalidRequest, "stop_token_ids", value, "a list of token ids")
    allowed = "a list of token ids, each an integer >= 0"
    for token_id in value:
        check_int(InvalidRequest, "stop_token_ids", token_id, 0, MAX_TOKEN_ID, allowed)
    return tuple(value)
