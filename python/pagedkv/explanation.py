"""Why a prompt was found in the cache as far as it was: the core's finding, in words of the tokenizer."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from pagedkv.text.tokenizer import Tokenizer

T = TypeVar("T")

Verdict = Literal[
    "hit",
    "never_seen",
    "diverged",
    "evicted",
    "other_salt",
    "other_adapter",
    "other_epoch",
    "not_computed_yet",
    "bypassed",
]

# Requests whose explanation can be asked for by name. The core keeps as many.
MAX_NAMES: Final = 1024


@dataclass(frozen=True, slots=True)
class Context:
    """The place where the match ended, as text: some tokens on each side.

    Attributes:
        before: the prompt before that place.
        held: what the cache has, or had, behind it; None if it has nothing.
        came: what the prompt has there.
    """

    before: str
    held: str | None
    came: str


@dataclass(frozen=True, slots=True)
class Evicted:
    """When, before the request was admitted, its next block was given up, and why.

    Attributes:
        age_s: seconds.
        reason: "capacity": its place was needed. "reset": the cache was told to forget everything.
    """

    age_s: float
    reason: Literal["capacity", "reset"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of a prompt when it was first admitted.

    Attributes:
        prompt_tokens: its length.
        cached_tokens: tokens that needed no computing.
        verdict: why it is not more. "hit": all but the last token was found, or all that was ever computed of
            it. "diverged": the cache holds, or held, something that goes on otherwise. "evicted": it was
            computed and given up. "not_computed_yet": another request is computing it. "other_salt",
            "other_adapter", "other_epoch": it was computed, in a namespace that this request may not use.
            "bypassed": the cache is switched off, or the prompt too short to be found. "never_seen": nothing
            of that is known; what was long ago is not remembered.
        token_index: the first token that the cache did not have.
        context: the texts around it.
        evicted: where the verdict is "evicted".
    """

    prompt_tokens: int
    cached_tokens: int
    verdict: Verdict
    token_index: int
    context: Context
    evicted: Evicted | None

    def as_json(self, request_id: str) -> dict[str, Any]:
        """The object of the HTTP API."""
        evicted = self.evicted
        return {
            "object": "cache.explanation",
            "id": request_id,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "verdict": self.verdict,
            "token_index": self.token_index,
            "context": {
                "before": self.context.before,
                "held": self.context.held,
                "came": self.context.came,
            },
            "evicted": evicted and {"age_s": evicted.age_s, "reason": evicted.reason},
        }


def from_core(found: Mapping[str, Any], tokenizer: "Tokenizer") -> Explanation:
    """The core's finding with texts in place of token ids."""

    def text(token_ids: list[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    held, evicted = found["held"], found["evicted"]
    return Explanation(
        prompt_tokens=found["prompt_tokens"],
        cached_tokens=found["cached_tokens"],
        verdict=found["verdict"],
        token_index=found["token_index"],
        context=Context(text(found["before"]), text(held) if held else None, text(found["came"])),
        evicted=None if evicted is None else Evicted(evicted[0] / 1000, evicted[1]),
    )


class RequestNames(Generic[T]):
    """Ids of the requests that were submitted last, by salt and by the name that a caller chose.

    A name that comes again names the newer request; names of different salts have nothing to do with each
    other.
    """

    def __init__(self) -> None:
        self._ids: OrderedDict[tuple[bytes, str], T] = OrderedDict()

    def add(self, salt: bytes, name: str, request_id: T) -> None:
        """Remembers a request, and forgets the oldest one where there are too many."""
        self._ids[salt, name] = request_id
        self._ids.move_to_end((salt, name))
        if len(self._ids) > MAX_NAMES:
            self._ids.popitem(last=False)

    def find(self, salt: bytes, name: str) -> T | None:
        """The id of a request, None where it is not known (any more)."""
        return self._ids.get((salt, name))
