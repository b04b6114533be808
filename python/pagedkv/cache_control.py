"""What users can ask of the cache beside requests: pins, sessions, lookups, a reset.

Two classes with the same methods, for `LLM` and, awaited, for `AsyncLLM`. Rules of both: a tenant, named by
its salt, sees and changes what is its own; names that do not exist raise NotFound; what has expired does not
exist.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from pagedkv import errors, holds
from pagedkv.checks import check_int
from pagedkv.errors import InvalidRequest
from pagedkv.holds import CacheLookup, CacheReset, Keeping, Pin, Session
from pagedkv.request import Prompt, Request, off_loop, prompt_len
from pagedkv.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedkv._core import Core
    from pagedkv.front import Front

T = TypeVar("T")

# A pin is made by a request that has to generate something; nobody sees what.
PIN_PARAMS = SamplingParams(max_tokens=1, temperature=0)


class CacheControl(ABC):
    """The methods of `LLM`. It has one tenant, with the empty salt."""

    _front: "Front"

    @abstractmethod
    def _ask(self, question: "Callable[[Core], T]") -> T:
        """What the core answers."""

    @abstractmethod
    def _generate_kept(self, keeping: Keeping) -> None:
        """Runs a request that leaves something behind, and drops the answer."""

    def pin(self, prompt: Prompt, ttl: float | None = None) -> Pin:
        """Keeps a prompt's blocks, computed if need be, until nothing has hit them for `ttl` seconds.

        Args:
            prompt: as in `generate`.
            ttl: seconds, above 0 and at most a day. None for an hour.

        Raises:
            InvalidRequest: the prompt cannot be served, or does not fit into `max_pinned_blocks`.
            Conflict: the pin is gone again: its ttl is over, or the cache was reset meanwhile.
        """
        pin_id = holds.new_id("pin")
        self._generate_kept(Keeping(self._front, prompt, PIN_PARAMS, kind="pin", name=pin_id, ttl=ttl))
        with _still_there():
            return self._ask(lambda core: holds.pin(core, b"", pin_id))

    def pins(self) -> list[Pin]:
        """All pins, the oldest first."""
        return self._ask(lambda core: holds.pins(core, b""))

    def unpin(self, pin_id: str) -> None:
        """Ends a pin; its blocks stay findable until the room is needed. Raises NotFound."""
        self._ask(lambda core: core.delete_hold("pin", b"", pin_id))

    def sessions(self) -> list[Session]:
        """All sessions, the oldest first."""
        return self._ask(lambda core: holds.sessions(core, b""))

    def session(self, session_id: str) -> Session:
        """One session. Raises NotFound."""
        return self._ask(lambda core: holds.session(core, b"", session_id))

    def session_token_ids(self, session_id: str) -> list[int]:
        """The tokens of a session: its prompts and answers. Raises NotFound."""
        return self._ask(lambda core: core.hold_tokens("session", b"", session_id).tolist())

    def fork_session(
        self, session_id: str, new_session_id: str | None = None, ttl: float | None = None
    ) -> Session:
        """Lets a session go on in two ways: a second one with the same tokens shares its blocks.

        Args:
            session_id: the session.
            new_session_id: name of the second one. None for a new name.
            ttl: seconds for which it lives unused. None for those of the session.

        Raises:
            NotFound: there is no such session.
            Conflict: there is one of the new name already.
            InvalidRequest: a value is not allowed, or there are too many sessions.
        """
        name, ttl_ms = _fork_arguments(new_session_id, ttl)
        return self._ask(lambda core: holds.fork_session(core, b"", session_id, name, ttl_ms))

    def delete_session(self, session_id: str) -> None:
        """Forgets a session, also what a running request would add to it. Raises NotFound."""
        self._ask(lambda core: core.delete_hold("session", b"", session_id))

    def lookup(self, prompt: Prompt) -> CacheLookup:
        """What would become of a prompt if it came now. Computes nothing and changes nothing."""
        tokens = self._front.request(prompt, PIN_PARAMS).tokens
        return self._ask(lambda core: holds.lookup(core, b"", tokens))

    def reset_prefix_cache(self) -> CacheReset:
        """Forgets every block that later prompts could find; nothing old is hit afterwards.

        Running requests keep theirs. Pins are gone; sessions keep their tokens, which their next request
        computes again.
        """
        return self._ask(lambda core: CacheReset(*core.reset_prefix_cache()))

    def set_model_epoch(self, model_epoch: int) -> None:
        """Says which weights compute from now on, by a number of the caller's own; at first it is 0.

        To be called when the weights were exchanged: what other weights computed is not found any more.
        Blocks of theirs go when the room is needed, pins are gone, and sessions keep their tokens alone.

        Raises InvalidRequest unless the number is in 0..2^64-1.
        """
        _check_epoch(model_epoch)
        self._ask(lambda core: core.set_model_epoch(model_epoch))


class AsyncCacheControl(ABC):
    """The methods of `AsyncLLM`; see `CacheControl` for what each does."""

    _front: "Front"

    @abstractmethod
    def _future(self, question: "Callable[[Core], T]") -> "Future[T]":
        """What the engine's thread will answer."""

    @abstractmethod
    async def _run_kept(self, request: Request) -> None:
        """Runs a request that leaves something behind, and drops the answer."""

    async def ask(self, question: "Callable[[Core], T]") -> T:
        """Has `question` answered by the engine's thread between two steps, also when idle.

        Raises EngineDead if there is none.
        """
        return await asyncio.wrap_future(self._future(question))

    async def pin(
        self,
        prompt: Prompt | Request,
        ttl: float | None = None,
        *,
        salt: bytes = b"",
        add_special_tokens: bool = True,
    ) -> Pin:
        """As `CacheControl.pin`. Raises QueueFull, EngineDead, RequestFailed besides."""
        pin_id = holds.new_id("pin")
        options = {"kind": "pin", "name": pin_id, "ttl": ttl, "salt": salt}
        request = await self._promised(
            prompt, PIN_PARAMS, **options, **_unprepared(prompt, add_special_tokens=add_special_tokens)
        )
        await self._run_kept(request)
        with _still_there():
            return await self.ask(lambda core: holds.pin(core, salt, pin_id))

    async def pins(self, *, salt: bytes = b"") -> list[Pin]:
        """A tenant's pins, the oldest first."""
        return await self.ask(lambda core: holds.pins(core, salt))

    async def unpin(self, pin_id: str, *, salt: bytes = b"") -> None:
        """Ends a pin."""
        await self.ask(lambda core: core.delete_hold("pin", salt, pin_id))

    async def prepare_session(
        self,
        prompt: Prompt | Request,
        sampling_params: SamplingParams | None = None,
        *,
        session_id: str,
        session_ttl: float | None = None,
        append: bool = False,
        salt: bytes = b"",
        **options: Any,
    ) -> Request:
        """A request for `submit` whose prompt and answer will be kept as a session.

        It must be submitted soon: room is set aside for it, and a session that it continues can be continued
        by nobody else. Cancelling this leaves nothing behind.

        Args:
            prompt: as in `prepare`, or a request that `prepare` made; with `append` what to continue the
                session with, which may be empty.
            sampling_params: as in `prepare`; n must be 1.
            session_id: name of the session, which is replaced if there is one.
            session_ttl: seconds for which it lives unused; above 0 and at most a day. None for an hour.
            append: begin the prompt with the session's tokens.
            salt: the tenant; a request that was prepared brings its own.
            options: priority, add_special_tokens and default_max_tokens of `prepare`.

        Raises:
            InvalidRequest: the request can never be served, or the budget of sessions does not allow it.
            NotFound: there is no such session to continue.
            Conflict: another request is continuing it.
        """
        if isinstance(prompt, Request):
            salt = prompt.salt
        if append:
            # Special tokens belong where a text begins.
            options["add_special_tokens"] = False
        names = {"kind": "session", "name": session_id, "ttl": session_ttl, "append": append}
        return await self._promised(
            prompt, sampling_params or SamplingParams(), **names, salt=salt, **options
        )

    async def sessions(self, *, salt: bytes = b"") -> list[Session]:
        """A tenant's sessions, the oldest first."""
        return await self.ask(lambda core: holds.sessions(core, salt))

    async def session(self, session_id: str, *, salt: bytes = b"") -> Session:
        """One session."""
        return await self.ask(lambda core: holds.session(core, salt, session_id))

    async def session_token_ids(self, session_id: str, *, salt: bytes = b"") -> list[int]:
        """The tokens of a session: its prompts and answers."""
        return await self.ask(lambda core: core.hold_tokens("session", salt, session_id).tolist())

    async def fork_session(
        self,
        session_id: str,
        new_session_id: str | None = None,
        ttl: float | None = None,
        *,
        salt: bytes = b"",
    ) -> Session:
        """Lets a session go on in two ways."""
        name, ttl_ms = _fork_arguments(new_session_id, ttl)
        return await self.ask(lambda core: holds.fork_session(core, salt, session_id, name, ttl_ms))

    async def delete_session(self, session_id: str, *, salt: bytes = b"") -> None:
        """Forgets a session."""
        await self.ask(lambda core: core.delete_hold("session", salt, session_id))

    async def lookup(
        self, prompt: Prompt | Request, *, salt: bytes = b"", add_special_tokens: bool = True
    ) -> CacheLookup:
        """What would become of a prompt if it came now."""

        def prepared() -> Request:
            if isinstance(prompt, Request):
                return prompt
            front = self._front
            return front.request(prompt, PIN_PARAMS, salt=salt, add_special_tokens=add_special_tokens)

        request = await off_loop(prompt_len(prompt), prepared)
        tokens = request.tokens
        return await self.ask(lambda core: holds.lookup(core, salt, tokens))

    async def reset_prefix_cache(self) -> CacheReset:
        """Forgets every block that later prompts could find."""
        return await self.ask(lambda core: CacheReset(*core.reset_prefix_cache()))

    async def set_model_epoch(self, model_epoch: int) -> None:
        """Says which weights compute from now on."""
        _check_epoch(model_epoch)
        await self.ask(lambda core: core.set_model_epoch(model_epoch))

    async def _promised(self, prompt: Prompt | Request, params: SamplingParams, **options: Any) -> Request:
        """A request for which the core has promised room."""
        size = prompt_len(prompt)
        keeping = await off_loop(size, lambda: Keeping(self._front, prompt, params, **options))
        asked = self._future(keeping.ask)
        try:
            await asyncio.wrap_future(asked)
            # A session may be long, whatever continues it.
            return await off_loop(keeping.num_tokens, keeping.request)
        except BaseException:
            # If the answer is still on its way, the question to take it back comes after it.
            asked.add_done_callback(lambda _: self._future(keeping.give_up))
            raise


@contextmanager
def _still_there() -> Iterator[None]:
    """Says of a pin that is gone before its maker has heard of it why that may be. Raises Conflict."""
    try:
        yield
    except errors.NotFound as error:
        raise errors.Conflict(
            "the pin is gone already: its ttl is over, or the cache was reset while the prompt was computed; "
            "pin it again"
        ) from error


def _check_epoch(model_epoch: object) -> None:
    check_int(InvalidRequest, "model_epoch", model_epoch, 0, 2**64 - 1, "an integer in 0..2^64-1")


def _fork_arguments(new_session_id: str | None, ttl: float | None) -> tuple[str, int | None]:
    name = holds.new_id("session") if new_session_id is None else holds.check_name("id", new_session_id)
    return name, None if ttl is None else holds.ttl_ms("ttl", ttl)


def _unprepared(prompt: Prompt | Request, **options: Any) -> dict[str, Any]:
    """Options for encoding a prompt; none where that is done."""
    return {} if isinstance(prompt, Request) else options


def check_session_arguments(session_id: str | None, session_ttl: float | None, append: bool) -> None:
    """Refuses what makes sense only with a session. Raises InvalidRequest."""
    if session_id is None and (session_ttl is not None or append):
        field = "append" if append else "session_ttl"
        value = append if append else session_ttl
        raise InvalidRequest(f"{field} is {value} without session_id, allowed: only with it", field)
