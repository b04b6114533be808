"""`AsyncLLM`: a model that serves requests as they come, from asyncio. The server is built on it.

The engine runs in a thread of its own. Requests go to it through the core's lock-free queues; what a step
brought about comes back as one call into the event loop, where texts are put together and the streams that
changed wake up.
"""

import asyncio
import atexit
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from pagedkv._core import Core
from pagedkv.base_llm import BaseLLM
from pagedkv.beam_search import BeamSearchOutput, BeamSearchParams
from pagedkv.cache_control import AsyncCacheControl, check_session_arguments
from pagedkv.engine import Engine, EngineThread
from pagedkv.errors import EngineDead
from pagedkv.events import StepReport
from pagedkv.explanation import Explanation
from pagedkv.outputs import RequestMetrics, RequestOutput, SampleChange
from pagedkv.ranked import BeamState
from pagedkv.request import AnyParams, Prompt, Request, off_loop, prompt_len
from pagedkv.sampling_params import SamplingParams
from pagedkv.streams import RequestState

T = TypeVar("T")


class Stream:
    """The growing answer to one request: an async iterator of `RequestOutput`, or of changes.

    Read it in one of two ways, not in both. Iterated over, every item holds the whole answer so far, and the
    last one is finished. `changes` gives only what is new, at a cost that does not grow with the answer.
    Steps that went by while nobody waited are joined into one item in either way. Both raise what made the
    request fail: RequestFailed or EngineDead.

    Attributes:
        request_id: as the caller chose it.
    """

    def __init__(self, state: RequestState, abort: Callable[[RequestState], None]) -> None:
        self.request_id = state.request_id
        self._state = state
        self._abort = abort
        self._news = asyncio.Event()
        self._exhausted = False

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as the model reads it."""
        return self._state.request.prompt_token_ids

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt whose keys and values were found in the cache; known with the first token."""
        return self._state.num_cached_tokens

    @property
    def metrics(self) -> RequestMetrics:
        """When things happened, as far as they have."""
        return self._state.metrics

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._exhausted:
            raise StopAsyncIteration
        await self._wait()
        return self._state.output()

    async def changes(self) -> AsyncGenerator[list[SampleChange], None]:
        """Yields what is new of the answers that have something new, until all have ended.

        Close it where it is left early; the request goes on until it is aborted.
        """
        while not self._exhausted:
            await self._wait()
            if changes := self._state.take_changes():
                yield changes

    def beam_output(self) -> BeamSearchOutput:
        """The answers of a beam search that is over. Raises TypeError if something else was asked for."""
        if not isinstance(self._state, BeamState):
            raise TypeError("the request asked for no beam search")
        return self._state.beam_output()

    async def _wait(self) -> None:
        """Waits for news; notes if they are the last. Raises the request's error."""
        await self._news.wait()
        self._news.clear()
        self._exhausted = self._state.finished
        if self._state.error is not None:
            raise self._state.error

    def abort(self) -> None:
        """Ends the request; its blocks are free one step later. Nothing happens if it has ended.

        Whoever waits for the next item gets a last one, with "abort" as finish_reason of what went on.
        """
        self._abort(self._state)

    def wake(self) -> None:
        """Tells the stream that its state changed."""
        self._news.set()


class AsyncLLM(BaseLLM, AsyncCacheControl):
    """Generates answers concurrently.

    All methods but `prepare`, `stats` and `heartbeat_age` belong to the thread of one event loop.

    The arguments are the fields of `EngineConfig`, which says what they mean and allow.
    """

    def _start(self, engine: Engine) -> None:
        self._edge, self._events = engine.edge, engine.events
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[int, Stream] = {}
        self._thread = EngineThread(engine, self._post, self._died)
        # A thread that is inside torch while the interpreter goes away would crash it.
        atexit.register(self._thread.stop)
        self._thread.start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread serves requests."""
        return self._thread.is_alive

    @property
    def num_in_flight(self) -> int:
        """Requests that have been submitted and have not ended."""
        return len(self._streams)

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the engine last showed that it goes on; see `EngineThread.heartbeat_age`."""
        return self._thread.heartbeat_age

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        salt: bytes = b"",
        priority: int = 0,
        session_id: str | None = None,
        session_ttl: float | None = None,
        append: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continues a prompt: yields the answer as it grows, the last time finished.

        Closing the generator, or cancelling the task that reads it, ends the request.

        Args:
            prompt: a text, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}.
            sampling_params: None for the defaults (temperature 1, 16 tokens).
            request_id: a name for the outputs and for `abort`; need not be unique. None: a number.
            salt: namespace of the prefix cache; only requests with the same salt share blocks. Salts share
                what there is fairly.
            priority: the least number is served first.
            session_id: keeps prompt and answer as a session of this name; n must be 1.
            session_ttl: seconds for which the session lives unused. None for an hour.
            append: begins the prompt with the session's tokens; the prompt may be empty then.

        Raises:
            InvalidRequest: the request can never be served.
            NotFound: there is no such session to continue.
            Conflict: another request is continuing it.
            QueueFull: as many requests as the engine accepts are in flight.
            EngineDead: the engine does not run, or stopped before the answer was complete.
            RequestFailed: the step that computed the request raised.
        """
        check_session_arguments(session_id, session_ttl, append)
        if session_id is not None:
            request = await self.prepare_session(
                prompt,
                sampling_params,
                session_id=session_id,
                session_ttl=session_ttl,
                append=append,
                salt=salt,
                priority=priority,
            )
        else:
            request = await off_loop(
                prompt_len(prompt),
                lambda: self.prepare(prompt, sampling_params, salt=salt, priority=priority),
            )
        stream = self.submit(request, sampling_params, request_id, salt=salt, priority=priority)
        try:
            async for output in stream:
                yield output
        finally:
            stream.abort()

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        salt: bytes = b"",
        priority: int = 0,
    ) -> BeamSearchOutput:
        """Searches for the likeliest continuations of a prompt. Cancelling the task ends the search.

        Arguments other than `params`, and what is raised, are those of `generate`.
        """
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params is of type {type(params).__name__}, allowed: BeamSearchParams")
        request = await off_loop(
            prompt_len(prompt), lambda: self.prepare(prompt, params, salt=salt, priority=priority)
        )
        stream = self.submit(request, request_id=request_id)
        try:
            async for _ in stream:
                pass
        finally:
            stream.abort()
        return stream.beam_output()

    def prepare(
        self,
        prompt: Prompt,
        sampling_params: AnyParams | None = None,
        *,
        salt: bytes = b"",
        priority: int = 0,
        add_special_tokens: bool = True,
        default_max_tokens: int | None = None,
    ) -> Request:
        """Encodes and checks a prompt without submitting it. Any thread may call this.

        Args:
            prompt: as in `generate`.
            sampling_params: as in `generate`, or those of a beam search.
            salt: as in `generate`.
            priority: as in `generate`.
            add_special_tokens: whether a text gets the BOS and EOS that the tokenizer adds.
            default_max_tokens: tokens to generate where max_tokens is None, fewer if the context leaves less
                room. None: all that it leaves.

        Raises:
            InvalidRequest: the request can never be served; its `field` says what has to change.
            TypeError: sampling_params is something else.
        """
        if sampling_params is not None and not isinstance(sampling_params, AnyParams):
            kind, allowed = type(sampling_params).__name__, "SamplingParams, BeamSearchParams or None"
            raise TypeError(f"sampling_params is of type {kind}, allowed: {allowed}")
        return self._front.request(
            prompt,
            sampling_params or SamplingParams(),
            salt=salt,
            priority=priority,
            add_special_tokens=add_special_tokens,
            default_max_tokens=default_max_tokens,
        )

    def submit(
        self,
        prompt: Prompt | Request,
        sampling_params: AnyParams | None = None,
        request_id: str | None = None,
        *,
        salt: bytes = b"",
        priority: int = 0,
    ) -> Stream:
        """The same as `generate`, but a refusal is raised at once, before anything has been awaited.

        A request from `prepare` brings its parameters and its salt itself. The caller has to `abort` the
        stream if it stops reading early. A long text holds up the event loop while it is encoded: have
        `prepare` called in a thread, as `generate` does.
        """
        request = prompt
        try:
            self._require_alive()
            self._bind_loop()
            if not isinstance(request, Request):
                request = self.prepare(request, sampling_params, salt=salt, priority=priority)
            state = self._front.submit(request, request_id)
        except BaseException:
            if isinstance(request, Request) and (promise := request.promise) is not None:
                self._future(lambda core: core.break_promise(promise))
            raise
        stream = Stream(state, self._abort_state)
        self._streams[state.core_id] = stream
        if not self._thread.is_alive:
            # It ended after the look above, and may have told the loop before this stream was there.
            self._fail_all()
        return stream

    def abort(self, request_id: str) -> bool:
        """Ends every request in flight that was given this id. False if there is none."""
        states = [state for state in self._front.streams if state.request_id == request_id]
        for state in states:
            self._abort_state(state)
        return bool(states)

    async def shutdown(self) -> None:
        """Ends the engine's thread after the step that it is in. Streams that go on raise EngineDead."""
        await asyncio.to_thread(self._thread.stop)
        atexit.unregister(self._thread.stop)

    def stats(self) -> dict[str, int]:
        """Counters as of the last step. Any thread may call this."""
        return self._edge.stats()

    async def explain(self, request_id: str, *, salt: bytes = b"") -> Explanation | None:
        """Why the prompt of a request was found in the cache as far as it was, and no further.

        Args:
            request_id: the name that was given at submit, or the number of one without a name.
            salt: that of the request; those of other salts are not found.

        Returns:
            None for a request that is not known (any more: the last 1024 are) or did not run yet.
        """
        core_id = self._front.names.find(salt, request_id)
        return None if core_id is None else await self.ask(lambda core: self._explain(core, core_id, salt))

    async def tenant_stats(self) -> dict[str, dict[str, int]]:
        """What every named tenant did and has, and under "other" all that were not named."""
        return await self.ask(self._tenant_stats)

    async def snapshot(self) -> dict[str, Any]:
        """A consistent picture of the cache."""
        return await self.ask(lambda core: core.snapshot())

    async def check_invariants(self) -> None:
        """Raises RuntimeError naming the first rule of the cache that does not hold."""
        await self.ask(lambda core: core.check_invariants())

    def _future(self, question: Callable[[Core], T]) -> Future[T]:
        return self._thread.ask(question)

    async def _run_kept(self, request: Request) -> None:
        stream = self.submit(request)
        try:
            async with aclosing(stream.changes()) as all_changes:
                async for _ in all_changes:
                    pass
        finally:
            stream.abort()

    def _require_alive(self) -> None:
        if not self._thread.is_alive:
            raise self._death()

    def _death(self) -> EngineDead:
        error = self._thread.error
        if error is None:
            return EngineDead("the engine was shut down")
        return EngineDead(f"the engine's thread died: {type(error).__name__}: {error}")

    def _bind_loop(self) -> None:
        """Events go to the loop of the caller; a loop that is gone leaves requests behind, which end here."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        if self._streams and self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("this AsyncLLM has requests in flight on another event loop")
        for state in self._front.streams:
            self._front.streams.abort(state)
        self._streams.clear()
        self._loop = loop

    def _abort_state(self, state: RequestState) -> None:
        self._front.streams.abort(state)
        self._wake([state])

    def _wake(self, states: list[RequestState]) -> None:
        for state in states:
            stream = self._streams.get(state.core_id)
            if stream is None:
                continue
            if state.finished:
                del self._streams[state.core_id]
            stream.wake()

    def _apply(self, report: StepReport) -> None:
        self._wake(self._front.streams.apply(report, self._events.take(report.step_id)))

    def _fail_all(self) -> None:
        self._wake(self._front.streams.fail_all(self._death))

    # The two below are called on the engine's thread.

    def _post(self, report: StepReport) -> None:
        try:
            assert self._loop is not None, "requests come from a loop"
            self._loop.call_soon_threadsafe(self._apply, report)
        except RuntimeError:
            # The loop was closed under its requests: nobody will read them.
            for core_id, *_ in self._events.take(report.step_id):
                self._edge.abort(core_id)

    def _died(self, reason: BaseException) -> None:
        if self._loop is None:
            return
        with suppress(RuntimeError):  # The loop may be closed; then there is nobody to tell.
            self._loop.call_soon_threadsafe(self._fail_all)
