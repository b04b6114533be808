"""The answer to a request while it grows: text, tokens, reasons to end, times.

A `RequestState` belongs to the caller's side (the asyncio thread of `AsyncLLM`, the caller's own in `LLM`);
the engine never sees it. `Streams` holds the states in flight and brings the events of a step to them.
"""

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pagedkv._core import Edge
from pagedkv.engine import ERROR, RUNNING, STOP, StepEvents
from pagedkv.errors import RequestFailed
from pagedkv.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from pagedkv.request import Request
from pagedkv.runner import RowLogprobs
from pagedkv.text.stream import SequenceText

if TYPE_CHECKING:
    from pagedkv.text.tokenizer import Tokenizer

logger = logging.getLogger("pagedkv")


class SampleState:
    """One of a request's n answers."""

    __slots__ = (
        "cumulative_logprob",
        "finish_reason",
        "index",
        "logprobs",
        "stop_reason",
        "text",
        "token_ids",
    )

    def __init__(self, index: int, text: SequenceText, *, with_logprobs: bool) -> None:
        self.index = index
        self.text = text
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = [] if with_logprobs else None
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Ends the answer and shows what was held back."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        if not self.text.stopped:
            self.text.end()
            if self.text.stopped:
                self.cut_at_stop_string()

    def cut_at_stop_string(self) -> int:
        """Ends the answer at the stop string that its text found; returns the number of tokens that stay."""
        num_tokens = self.text.stop_at_tokens
        assert num_tokens is not None, "the text has found a stop string"
        if self.logprobs is not None:
            beyond = zip(self.token_ids[num_tokens:], self.logprobs[num_tokens:], strict=True)
            self.cumulative_logprob -= sum(entry[token_id].logprob for token_id, entry in beyond)
            del self.logprobs[num_tokens:]
        del self.token_ids[num_tokens:]
        self.finish_reason, self.stop_reason = "stop", self.text.stop_string
        return num_tokens

    def output(self) -> CompletionOutput:
        """The answer so far, as data of its own."""
        return CompletionOutput(
            index=self.index,
            text=self.text.text,
            token_ids=self.token_ids.copy(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.logprobs is None else self.logprobs.copy(),
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
        )


class RequestState:
    """A request in flight.

    Attributes:
        core_id: the core's name for it; unique, where `request_id` is whatever the caller chose.
        error: why it failed, if it did.
    """

    def __init__(self, request: Request, request_id: str, core_id: int, tokenizer: "Tokenizer") -> None:
        params = request.params
        self.request = request
        self.request_id = request_id
        self.core_id = core_id
        self.error: Exception | None = None
        self.metrics = RequestMetrics(request.arrival_time)
        self.num_cached_tokens = 0
        self._tokenizer = tokenizer
        self._num_going = params.n
        self.samples = [
            SampleState(
                idx,
                SequenceText(
                    tokenizer,
                    params.stop_strings,
                    params.include_stop_str_in_output,
                    params.skip_special_tokens,
                    at_start=False,
                ),
                with_logprobs=params.logprobs is not None,
            )
            for idx in range(params.n)
        ]

    @property
    def finished(self) -> bool:
        """Whether no answer goes on, because all have ended or the request failed."""
        return self._num_going == 0

    def add_token(
        self,
        sample_idx: int,
        token_id: int,
        state: int,
        num_cached_tokens: int,
        logprobs: TokenLogprobs | None,
    ) -> int | None:
        """Appends a sampled token.

        Returns:
            The length at which the core should end the sample, because a stop string is complete there and
            the core does not know; None otherwise.
        """
        sample = self.samples[sample_idx]
        if sample.finish_reason is not None:
            # It was computed before the core heard that the sample had ended.
            return None
        if self.metrics.first_token_time is None:
            self.num_cached_tokens = num_cached_tokens
        sample.token_ids.append(token_id)
        if sample.logprobs is not None:
            assert logprobs is not None, "the runner gives log-probabilities to every row that asked"
            sample.logprobs.append(logprobs)
            sample.cumulative_logprob += logprobs[token_id].logprob
        if state != STOP or self.request.params.include_stop_str_in_output:
            sample.text.add(token_id)
            if sample.text.stopped:
                num_tokens = sample.cut_at_stop_string()
                self._num_going -= 1
                return num_tokens if state == RUNNING else None
        if state == STOP:
            self._finish(sample, "stop", token_id if token_id in self.request.params.stop_ids else None)
        elif state != RUNNING:
            self._finish(sample, "length")
        return None

    def end(self, sample_idx: int, reason: int, error: str | None) -> None:
        """Takes note that the core ended a sample by itself: it was aborted, or its step failed."""
        if reason == ERROR:
            self.fail(RequestFailed(f"the step that computed this request failed: {error}"))
        elif self.samples[sample_idx].finish_reason is None:
            self._finish(self.samples[sample_idx], "abort")

    def abort(self) -> None:
        """Ends every answer that still goes on."""
        for sample in self.samples:
            if sample.finish_reason is None:
                self._finish(sample, "abort")

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, which its stream raises."""
        self.error = error
        self._num_going = 0

    def output(self) -> RequestOutput:
        """The request and its answers so far, as data of its own."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[sample.output() for sample in self.samples],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
        )

    def token_logprobs(self, token_id: int, row: int, logprobs: RowLogprobs) -> TokenLogprobs:
        """One generated token's log-probabilities: its own first, then those of the most likely tokens."""
        entry = logprobs.index[row]
        most = self.request.params.logprobs or 0
        top_ids, top = logprobs.top_ids[entry][:most], logprobs.top[entry][:most]
        rank = top_ids.index(token_id) + 1 if token_id in top_ids else None
        result = {token_id: Logprob(logprobs.chosen[entry], rank, self._text_of(token_id))}
        for place, (top_id, value) in enumerate(zip(top_ids, top, strict=True), start=1):
            if top_id != token_id:
                result[top_id] = Logprob(value, place, self._text_of(top_id))
        return result

    def _text_of(self, token_id: int) -> str:
        return self._tokenizer.token(token_id)

    def _finish(
        self, sample: SampleState, reason: FinishReason, stop_reason: str | int | None = None
    ) -> None:
        sample.finish(reason, stop_reason)
        self._num_going -= 1


class Streams:
    """The requests in flight, by the core's ids."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._states: dict[int, RequestState] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(list(self._states.values()))

    def add(self, state: RequestState) -> None:
        """Takes a submitted request in."""
        self._states[state.core_id] = state

    def abort(self, state: RequestState) -> None:
        """Ends a request now; the core frees its blocks in its next step. Nothing happens if it has ended."""
        if self._states.pop(state.core_id, None) is not None:
            self._edge.abort(state.core_id)
            state.abort()
            state.metrics.finished_time = time.monotonic()

    def fail_all(self, error: Callable[[], Exception]) -> list[RequestState]:
        """Ends every request with an error of its own and returns them."""
        states = list(self._states.values())
        self._states.clear()
        for state in states:
            state.fail(error())
        return states

    def apply(self, events: StepEvents) -> list[RequestState]:
        """Brings a step's events to their requests and returns those that changed, each once.

        Requests that ended by this are in flight no more. Events of unknown requests are what the core
        computed before it heard of an end, and are dropped.
        """
        changed: dict[int, RequestState] = {}
        rows = zip(
            events.request_ids,
            events.sample_idxs,
            events.token_ids,
            events.states,
            events.num_cached_tokens,
            strict=True,
        )
        for row, (core_id, sample_idx, token_id, row_state, num_cached_tokens) in enumerate(rows):
            state = self._states.get(core_id)
            if state is None:
                continue
            changed[core_id] = state
            try:
                logprobs = None
                if events.logprobs is not None and row in events.logprobs.index:
                    logprobs = state.token_logprobs(token_id, row, events.logprobs)
                end_at = state.add_token(sample_idx, token_id, row_state, num_cached_tokens, logprobs)
            except Exception as error:
                # A text that cannot be put together must not keep the step's other requests from theirs.
                logger.exception("request %s failed", state.request_id)
                self._edge.abort(core_id)
                state.fail(RequestFailed(f"its text failed: {type(error).__name__}: {error}"))
                continue
            if end_at is not None:
                self._edge.finish(core_id, sample_idx, end_at)
        for core_id, sample_idx, reason in events.ended:
            state = self._states.get(core_id)
            if state is not None:
                state.end(sample_idx, reason, events.error)
                changed[core_id] = state
        for core_id, state in changed.items():
            self._note_times(state, events)
            if state.finished:
                del self._states[core_id]
        return list(changed.values())

    @staticmethod
    def _note_times(state: RequestState, events: StepEvents) -> None:
        metrics = state.metrics
        if metrics.first_token_time is None and any(sample.token_ids for sample in state.samples):
            metrics.first_scheduled_time, metrics.first_token_time = events.started_s, events.finished_s
        if state.finished:
            metrics.finished_time = events.finished_s
