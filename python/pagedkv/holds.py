"""Pins, sessions and lookups as plain data, and the way from a prompt to a request that leaves one behind.

`cache_control` asks a core for them, on behalf of `LLM` and `AsyncLLM`; everything that takes a `Core` here
is called where the core may be called.
"""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from numpy.typing import NDArray

from pagedkv.checks import check_bool, check_float, refusal
from pagedkv.errors import InvalidRequest
from pagedkv.request import Prompt, Request
from pagedkv.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from pagedkv._core import Core
    from pagedkv.front import Front

MAX_TTL_S: Final = 86_400.0
DEFAULT_TTL_S: Final = 3_600.0
MAX_NAME_CHARS: Final = 256
# The core is told the time of `time.monotonic`, which never jumps. What it says of the time is
# moved to the calendar by this once and for all, so that a moment has one name.
_EPOCH_S: Final = time.time() - time.monotonic()


@dataclass(frozen=True, slots=True)
class Hold:
    """What is kept beyond its request.

    Attributes:
        id: its name.
        tokens: length of the prompt of a pin; of all prompts and answers of a session.
        blocks: cache blocks that it holds. 0 for a session after a reset of the cache: then the next request
            computes the tokens again.
        expires_at: when it ends unless a pin is hit, or a session used, before; in seconds since 1970.
    """

    id: str
    tokens: int
    blocks: int
    expires_at: float


class Pin(Hold):
    """A prompt whose blocks are kept."""

    __slots__ = ()


class Session(Hold):
    """A conversation that is kept."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class CacheLookup:
    """What would become of a prompt if it came now.

    Attributes:
        prompt_tokens: its length.
        cached_tokens: leading tokens that would not be computed. At least the last one always is.
        tiers: the cached tokens by where they are.
        admissible: whether it would start at once.
        reason: what is in the way: "too_long", "too_many_sequences", "not_enough_blocks" or "others_wait".
        blocks_needed: blocks that the prompt would take.
        blocks_available: blocks that it could take.
    """

    prompt_tokens: int
    cached_tokens: int
    tiers: dict[str, int]
    admissible: bool
    reason: str | None
    blocks_needed: int
    blocks_available: int


class CacheReset(NamedTuple):
    """What a reset gave up.

    Attributes:
        blocks: blocks that prompts could find.
        pins: pins that are gone.
        sessions: sessions of which only the tokens are left.
    """

    blocks: int
    pins: int
    sessions: int


class Keeping:
    """A request on its way that will leave a pin or a session behind, in three steps.

    It is made, which encodes and checks the prompt; `ask` has the core promise the room; `request` is what
    can be submitted then. Whoever does not come to submit it must `give_up`.

    Args:
        front: encodes and checks.
        prompt: what to continue; or, with `append`, what to continue the session with, which may be empty.
        params: how.
        kind: what is left behind.
        name: its name.
        ttl: seconds for which it lives unused. None for DEFAULT_TTL_S.
        append: begin the prompt with the session's tokens.
        salt: the tenant.
        options: further arguments of `Front.request`.

    Raises:
        InvalidRequest: with the field, its value and what is allowed.
    """

    def __init__(
        self,
        front: "Front",
        prompt: Prompt | Request,
        params: SamplingParams,
        *,
        kind: Literal["pin", "session"],
        name: str,
        ttl: float | None,
        append: bool = False,
        salt: bytes = b"",
        **options: Any,
    ) -> None:
        self._front, self._params, self._options = front, params, {"salt": salt, **options}
        self._kind, self._salt, self._append = kind, salt, append
        self._name = check_name(f"{kind}_id", name)
        self._ttl_ms = ttl_ms(f"{kind}_ttl" if kind == "session" else "ttl", ttl)
        check_bool(InvalidRequest, "append", append, "True or False")
        for count, value in (("n", params.n), ("best_of", params.num_samples)):
            if value != 1:
                raise InvalidRequest(f"{count} is {value} with a {kind}, allowed: 1", count)
        self._request: Request | None = None
        self._promise: int | None = None
        self._whole: NDArray[np.int32]
        if append:
            if isinstance(prompt, Request):
                raise TypeError("a session is continued by a prompt that has not been prepared")
            self._whole = front.continuation(prompt)
            default = options.get("default_max_tokens") or front.limits.max_model_len
            self._max_tokens = default if params.max_tokens is None else params.max_tokens
        else:
            made = prompt if isinstance(prompt, Request) else front.request(prompt, params, **self._options)
            self._request, self._whole, self._max_tokens = made, made.tokens, made.max_tokens

    @property
    def num_tokens(self) -> int:
        """Length of the prompt as far as it is known; of the whole one after `ask`."""
        return len(self._whole)

    def ask(self, core: "Core") -> None:
        """Has the core promise the room.

        Raises:
            NotFound: the session to continue does not exist.
            Conflict: another request is continuing it.
            InvalidRequest: the budget of pins and sessions does not allow it.
        """
        with in_words():
            self._promise, self._whole = core.promise_hold(
                self._kind,
                self._salt,
                self._name,
                ttl_ms=self._ttl_ms,
                tokens=self._whole,
                max_tokens=min(self._max_tokens, self._front.limits.max_model_len),
                append=self._append,
            )

    def request(self) -> Request:
        """The request, to be submitted. Raises InvalidRequest if it can never be served."""
        request = self._request
        if request is None:
            request = self._front.request(self._whole.tolist(), self._params, **self._options)
        request.promise = self._promise
        return request

    def give_up(self, core: "Core") -> None:
        """Breaks the promise, if there is one and it was not kept."""
        if self._promise is not None:
            core.break_promise(self._promise)


@contextmanager
def in_words() -> Iterator[None]:
    """Raises the core's refusals as `pagedkv.InvalidRequest`."""
    # Imported here: the server reads this module, and says itself what to do where the core is not built.
    from pagedkv import _core

    try:
        yield
    except _core.InvalidRequest as error:
        raise InvalidRequest(str(error)) from error


def new_id(kind: str) -> str:
    """A name that nobody has."""
    return f"{kind}-{uuid.uuid4().hex}"


def told_ms() -> int:
    """The time as the core is told it."""
    return time.monotonic_ns() // 1_000_000


def ttl_ms(field: str, ttl: float | None) -> int:
    """A time to live in milliseconds. Raises InvalidRequest unless it is above 0 and at most a day."""
    allowed = "a number of seconds above 0 and at most 86400 (a day)"
    if ttl is None:
        ttl = DEFAULT_TTL_S
    check_float(InvalidRequest, field, ttl, 0.0, MAX_TTL_S, allowed)
    if ttl == 0:
        raise refusal(InvalidRequest, field, ttl, allowed)
    return max(1, round(ttl * 1000))


def check_name(field: str, name: object) -> str:
    """A name. Raises InvalidRequest for what is none."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS:
        raise refusal(InvalidRequest, field, name, f"a text of 1 to {MAX_NAME_CHARS} characters")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise refusal(InvalidRequest, field, name, "a text without halves of surrogate pairs") from error
    return name


def pins(core: "Core", salt: bytes) -> list[Pin]:
    """A tenant's pins, the oldest first."""
    return [Pin(*_held(one)) for one in core.holds("pin", salt)]


def pin(core: "Core", salt: bytes, pin_id: str) -> Pin:
    """One pin. Raises NotFound."""
    return Pin(*_held(core.hold("pin", salt, pin_id)))


def sessions(core: "Core", salt: bytes) -> list[Session]:
    """A tenant's sessions, the oldest first."""
    return [Session(*_held(one)) for one in core.holds("session", salt)]


def session(core: "Core", salt: bytes, session_id: str) -> Session:
    """One session. Raises NotFound."""
    return Session(*_held(core.hold("session", salt, session_id)))


def fork_session(core: "Core", salt: bytes, session_id: str, new_id: str, ttl: int | None) -> Session:
    """A second session with the same tokens and blocks. Raises NotFound, Conflict, InvalidRequest."""
    with in_words():
        return Session(*_held(core.fork_session(salt, session_id, new_id, ttl)))


def lookup(core: "Core", salt: bytes, tokens: "NDArray[np.int32]") -> CacheLookup:
    """What would become of a prompt; nothing changes by it."""
    cached_tokens, needed, available, reason = core.lookup(salt, tokens)
    return CacheLookup(
        prompt_tokens=len(tokens),
        cached_tokens=cached_tokens,
        tiers={"device": cached_tokens},
        admissible=reason is None,
        reason=reason,
        blocks_needed=needed,
        blocks_available=available,
    )


def _held(one: tuple[str, int, int, int]) -> tuple[str, int, int, float]:
    name, tokens, blocks, expires_at_ms = one
    return name, tokens, blocks, round(_EPOCH_S + expires_at_ms / 1000, 3)
