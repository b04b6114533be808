"""The answer to a request while it grows: text, tokens, reasons to end, times.

A `RequestState` belongs to the caller's side (the asyncio thread of `AsyncLLM`, the caller's own in `LLM`);
the engine never sees it. `Streams` holds the states in flight and brings the events of a step to them.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from pagedkv._core import Edge
from pagedkv.errors import RequestFailed
from pagedkv.events import ERROR, NO_TOKEN, RUNNING, STOP, BeamAnswer, Event, RowLogprobs, StepReport
from pagedkv.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SampleChange,
    TokenLogprobs,
)
from pagedkv.request import Request
from pagedkv.text.stream import SequenceText

if TYPE_CHECKING:
    from pagedkv.text.tokenizer import Tokenizer

logger = logging.getLogger("pagedkv")


class SampleState:
    """One of a request's n answers."""

    __slots__ = (
        "_num_taken",
        "_pending_text",
        "_took_end",
        "cumulative_logprob",
        "finish_reason",
        "index",
        "logprobs",
        "stop_reason",
        "text",
        "text_offsets",
        "token_ids",
    )

    def __init__(self, index: int, text: SequenceText | None, *, with_logprobs: bool) -> None:
        """Begins an answer; `text` is None if nobody wants it as text."""
        self.index = index
        self.text = text
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = [] if with_logprobs else None
        # As in `SampleChange`.
        self.text_offsets: list[int] | None = [] if with_logprobs and text is not None else None
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        # What `take_change` has not given out yet.
        self._pending_text: list[str] = []
        self._num_taken = 0
        self._took_end = False

    @property
    def stopped(self) -> bool:
        """Whether the text has found a stop string."""
        return self.text is not None and self.text.stopped

    def add_text(self, token_id: int) -> None:
        """Brings a token to the text, if there is to be one."""
        if self.text is not None:
            self._pending_text.append(self.text.add(token_id))

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Ends the answer and shows what was held back."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self.text is not None and not self.text.stopped:
            self._pending_text.append(self.text.end())
            if self.text.stopped:
                self.cut_at_stop_string()

    def cut_at_stop_string(self) -> int:
        """Ends the answer at the stop string that its text found; returns the number of tokens that stay.

        At most the token that has just come is dropped, so nothing that was given out is taken back.
        """
        assert self.text is not None, "stop strings are found in a text"
        num_tokens = self.text.stop_at_tokens
        assert num_tokens is not None, "the text has found a stop string"
        if self.logprobs is not None:
            beyond = zip(self.token_ids[num_tokens:], self.logprobs[num_tokens:], strict=True)
            self.cumulative_logprob -= sum(entry[token_id].logprob for token_id, entry in beyond)
            del self.logprobs[num_tokens:]
        if self.text_offsets is not None:
            del self.text_offsets[num_tokens:]
        del self.token_ids[num_tokens:]
        self.finish_reason, self.stop_reason = "stop", self.text.stop_string
        return num_tokens

    def take_change(self) -> SampleChange | None:
        """What is new since the last call, None if nothing is."""
        ended = self.finish_reason is not None and not self._took_end
        text = "".join(self._pending_text)
        if not (ended or text or len(self.token_ids) > self._num_taken):
            return None
        start, self._num_taken = self._num_taken, len(self.token_ids)
        self._pending_text.clear()
        self._took_end = ended or self._took_end
        return SampleChange(
            index=self.index,
            text=text,
            token_ids=self.token_ids[start:],
            logprobs=None if self.logprobs is None else self.logprobs[start:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            text_offsets=None if self.text_offsets is None else self.text_offsets[start:],
        )

    def output(self) -> CompletionOutput:
        """The answer so far, as data of its own."""
        return CompletionOutput(
            index=self.index,
            text="" if self.text is None else self.text.text,
            token_ids=self.token_ids.copy(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if self.logprobs is None else self.logprobs.copy(),
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
        )


class RequestState:
    """A request in flight.

    Attributes:
        grows: whether its answers show before they are complete.
        core_id: the core's name for it; unique, where `request_id` is whatever the caller chose.
        error: why it failed, if it did.
    """

    grows = True

    def __init__(self, request: Request, request_id: str, core_id: int, tokenizer: "Tokenizer") -> None:
        params = request.params
        self.request = request
        self.request_id = request_id
        self.core_id = core_id
        self.error: Exception | None = None
        self.metrics = RequestMetrics(request.arrival_time)
        self.num_cached_tokens = 0
        self._tokenizer = tokenizer
        self.samples = [
            SampleState(idx, self._new_text(), with_logprobs=self._needs_logprobs)
            for idx in range(params.num_samples)
        ]

    def _new_text(self) -> SequenceText | None:
        params = self.request.params
        if not params.detokenize:
            return None
        return SequenceText(
            self._tokenizer,
            params.stop_strings,
            params.include_stop_str_in_output,
            params.skip_special_tokens,
            at_start=False,
        )

    @property
    def _needs_logprobs(self) -> bool:
        return self.request.params.logprobs is not None

    @property
    def given(self) -> list[SampleState]:
        """The answers that are given out."""
        return self.samples

    @property
    def finished(self) -> bool:
        """Whether no answer goes on, because all have ended or the request failed."""
        return self.error is not None or all(sample.finish_reason is not None for sample in self.samples)

    def add_token(self, report: StepReport, event: Event) -> int | None:
        """Appends the token that was sampled in a row of a step.

        Returns:
            The length at which the core should end the sample, because a stop string is complete there and
            the core does not know; None otherwise.
        """
        _, row, sample_idx, token_id, state, num_cached_tokens = event
        sample = self.samples[sample_idx]
        if self.error is not None or sample.finish_reason is not None:
            # It was computed before the core heard of the end.
            return None
        self._note_token(report, num_cached_tokens)
        sample.token_ids.append(token_id)
        if sample.logprobs is not None:
            assert report.logprobs is not None, "the runner gives log-probabilities to every row that asked"
            entry = self._token_logprobs(token_id, row, report.logprobs)
            sample.logprobs.append(entry)
            if sample.text is not None and sample.text_offsets is not None:
                sample.text_offsets.append(sample.text.offset_of(token_id))
            sample.cumulative_logprob += entry[token_id].logprob
        params = self.request.params
        if state != STOP or params.include_stop_str_in_output:
            sample.add_text(token_id)
            if sample.stopped:
                num_tokens = sample.cut_at_stop_string()
                # A session that the core has made of the answer is cut as well.
                return num_tokens if state == RUNNING or self.request.promise is not None else None
        if state == STOP:
            sample.finish("stop", token_id if token_id in params.stop_ids else None)
        elif state != RUNNING:
            sample.finish("length")
        if sample.stopped and self.request.promise is not None:
            return len(sample.token_ids)
        return None

    def add_answers(self, answers: list[BeamAnswer]) -> None:
        """Takes the answers of a beam search."""
        raise RuntimeError(f"{len(answers)} answers of a beam search came for a request that asked for none")

    def end(self, sample_idx: int, reason: int, error: Exception | None) -> None:
        """Takes note that the core ended a sample by itself: it was aborted, or its step failed."""
        if self.error is not None:
            return
        if reason == ERROR:
            cause = f"{type(error).__name__}: {error}"
            self.fail(RequestFailed(f"the step that computed this request failed: {cause}"))
        elif self.samples[sample_idx].finish_reason is None:
            self.samples[sample_idx].finish("abort")

    def abort(self) -> None:
        """Ends every answer that still goes on."""
        if self.error is not None:
            return
        for sample in self.samples:
            if sample.finish_reason is None:
                sample.finish("abort")

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, which its stream raises."""
        self.error = error

    def take_changes(self) -> list[SampleChange]:
        """What is new since the last call, of the answers that have something new."""
        changes = (sample.take_change() for sample in self.given)
        return [change for change in changes if change is not None]

    def output(self) -> RequestOutput:
        """The request and its answers so far.

        The answers are data of their own; the prompt's token ids and the times are those of the request.
        """
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[sample.output() for sample in self.given],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
        )

    def _note_token(self, report: StepReport, num_cached_tokens: int) -> None:
        metrics = self.metrics
        if metrics.first_token_time is None:
            metrics.first_scheduled_time, metrics.first_token_time = report.started_s, report.finished_s
            self.num_cached_tokens = num_cached_tokens
        metrics.last_token_time = report.finished_s

    def _token_logprobs(self, token_id: int, row: int, logprobs: RowLogprobs) -> TokenLogprobs:
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

    def _text_of(self, token_id: int) -> str | None:
        return self._tokenizer.token(token_id) if self.request.params.detokenize else None


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

    def apply(self, report: StepReport, events: Sequence[Event]) -> list[RequestState]:
        """Brings a step's events to their requests and returns those that changed, each once.

        What a request does not show before its end counts as a change only then. Requests that ended by this
        are in flight no more. Events of unknown requests are what the core computed before it heard of an
        end, and are dropped.
        """
        changed: dict[int, RequestState] = {}
        for event in events:
            core_id, _, sample_idx, token_id, reason, _ = event
            state = self._states.get(core_id)
            if state is None:
                continue
            changed[core_id] = state
            if token_id == NO_TOKEN:
                state.end(sample_idx, reason, report.error)
                continue
            try:
                end_at = state.add_token(report, event)
            except Exception as error:
                self._fail(state, error)
                continue
            if end_at is not None:
                self._edge.finish(core_id, sample_idx, end_at)
        for core_id, answers in report.answers:
            if (state := self._states.get(core_id)) is None:
                continue
            try:
                state.add_answers(answers)
            except Exception as error:
                self._fail(state, error)
        for core_id, state in changed.items():
            if state.finished:
                state.metrics.finished_time = report.finished_s
                del self._states[core_id]
        return [state for state in changed.values() if state.grows or state.finished]

    def _fail(self, state: RequestState, error: Exception) -> None:
        """A text that cannot be put together must not keep the step's other requests from theirs."""
        logger.exception("request %s failed", state.request_id, exc_info=error)
        self._edge.abort(state.core_id)
        state.fail(RequestFailed(f"its text failed: {type(error).__name__}: {error}"))
