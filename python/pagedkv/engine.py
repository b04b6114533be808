"""The engine: steps of schedule, forward and commit, and the thread that takes them.

`Engine` has no thread of its own: `LLM` calls `step` itself. `EngineThread` calls it in a loop for `AsyncLLM`
and is the only thread that touches the core then. What a step brought about leaves through the core's ring of
events, row by row, and a `StepReport` says that it is there.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pagedkv._core import Core, StepHeader
from pagedkv.errors import EngineDead
from pagedkv.events import VOID, BeamAnswer, StepReport
from pagedkv.holds import told_ms
from pagedkv.ops import unsampled
from pagedkv.runner import LaunchedStep, ModelRunner

logger = logging.getLogger("pagedkv")
T = TypeVar("T")

# Without news the thread looks around this often, which is also how it shows that it is alive.
IDLE_WAIT_S: Final = 0.25
# CPython hands the GIL over only after this interval when a thread does not let go by itself. A step lets go
# in every call that computes for a millisecond or more; at the usual 5 ms each return could wait that long
# for a busy asyncio thread.
SWITCH_INTERVAL_S: Final = 1e-4


@dataclass(slots=True)
class _StepInFlight:
    """A step that was scheduled and not committed yet.

    `launched` is None, and `error` says why, where it could not be launched.
    """

    header: StepHeader
    report: StepReport
    launched: LaunchedStep | None = None
    error: Exception | None = None


class Engine:
    """One core and one model runner. Not thread-safe, but for `events`, which belong to their reader.

    With overlap a step is scheduled and launched before the one before it is waited for, so that the device
    does not wait for the host. It then takes its tokens from that one, on the device.

    Attributes:
        events: what the steps brought about.
        last_error: what the last step that failed raised, or what was wrong with a row of logits.
    """

    def __init__(self, core: Core, runner: ModelRunner, *, overlap: bool = False) -> None:
        self.core = core
        self.edge = core.edge
        self.events = core.open_events()
        self.runner = runner
        self.last_error: Exception | None = None
        self._process_id = os.getpid()
        self._arena = runner.new_arena(core.arena_len)
        self._most_in_flight = 2 if overlap else 1
        self._in_flight: deque[_StepInFlight] = deque()

    def require_own_process(self) -> None:
        """Raises EngineDead in a fork of the process that loaded the engine.

        The threads that compute are not forked with it: a step would wait for them for good.
        """
        if os.getpid() != self._process_id:
            raise EngineDead("the engine was loaded before a fork; load it in the process that uses it")

    def step(self) -> StepReport | None:
        """Finishes one step, the next one being launched before with overlap. None: there was nothing to do.

        A forward pass that raises costs the requests of its step, a row that cannot be sampled its request,
        and nothing else; a later step reports them as ended. Raises what the device raises if it does not
        work any more after such a failure.
        """
        # Nothing can go on from a step that was not computed.
        while len(self._in_flight) < self._most_in_flight and not self._is_failed:
            report = self._begin()
            if report is None:
                break
            if not self._in_flight:
                return report  # Some requests ended, and nothing is left to compute.
        return self._finish() if self._in_flight else None

    def ask(self, question: Callable[[Core], T]) -> T:
        """Has the core, which hears the time first, answer a question between two steps."""
        self.core.set_time(told_ms())
        return question(self.core)

    def use_idle_time(self) -> bool:
        """Makes a little of the cache ready for sequences to come. False: nothing is to be done.

        Any thread may call this, one at a time, while no step is taken.
        """
        stats = self.edge.stats()
        return self.runner.make_ready(stats["blocks_total"] - stats["blocks_free"])

    def settle(self) -> None:
        """Brings the core to rest after everything in flight was aborted, also if a step was cut short."""
        if self.core.num_in_flight != len(self._in_flight):
            self._give_up()
        while (report := self.step()) is not None:
            self.events.take(report.step_id)

    @property
    def _is_failed(self) -> bool:
        return bool(self._in_flight) and self._in_flight[-1].error is not None

    def _begin(self) -> StepReport | None:
        """Schedules a step and launches it.

        Returns the report that announces the requests which ended by now. None: there is nothing to compute,
        at least not before the step in flight is committed.
        """
        started = time.monotonic()
        self.core.set_time(told_ms())
        header = self.core.schedule(self._arena)
        if header is None:
            return None
        report = StepReport(header.step_id, 0, None, None, started, started)
        announcing = self._in_flight[0].report if self._in_flight else report
        announcing.num_events += header.num_ended
        announcing.error = self.last_error
        if header.num_tokens == 0:
            return None if self._in_flight else report
        step = _StepInFlight(header, report)
        self._in_flight.append(step)
        try:
            step.launched = self.runner.launch(header, self._arena)
        except Exception as error:
            step.error = error
        except BaseException:
            self._give_up()
            raise
        return announcing

    def _finish(self) -> StepReport:
        """Waits for the oldest step in flight and commits it, or fails it."""
        step = self._in_flight[0]
        header, report = step.header, step.report
        try:
            if step.launched is None:
                raise step.error or RuntimeError("the step was never launched")
            result = step.launched.result()
        except Exception as error:
            self._in_flight.popleft()
            self.core.fail_step()
            logger.exception("step %d failed; its requests end with an error", header.step_id)
            self.last_error = error
            self.runner.probe()
            return report
        except BaseException:
            self._give_up()
            raise
        if (wrong := unsampled(result.tokens)) is not None:
            logger.error("step %d: %s; its request ends with an error", header.step_id, wrong)
            self.last_error = wrong
        states = self.core.commit(header.step_id, result.tokens, result.candidates)
        self._in_flight.popleft()
        if header.num_beam_rows:
            report.answers = [
                (core_id, [BeamAnswer(*answer) for answer in answers])
                for core_id, answers in self.core.take_beams()
            ]
        report.num_events += header.num_rows
        if wrong is not None or self._most_in_flight > 1:
            report.num_events -= int((states == VOID).sum())
        report.logprobs = result.logprobs
        report.finished_s = time.monotonic()
        return report

    def _give_up(self) -> None:
        """Fails whatever is in flight, also what the engine does not know of because it was interrupted."""
        self._in_flight.clear()
        for _ in range(self.core.num_in_flight):
            self.core.fail_step()


class EngineThread:
    """The thread that steps an engine, and what other threads may ask of it.

    `post` gets the report of every step that has events, once all of them can be taken; `died` is called
    once, with the reason, if the thread ends for any other cause than `stop`. Both are called on the engine's
    thread and must return at once.
    """

    def __init__(
        self, engine: Engine, post: Callable[[StepReport], None], died: Callable[[BaseException], None]
    ) -> None:
        self._engine = engine
        self._post = post
        self._died = died
        # Those whose events wait for room in the ring, because the reader is slow.
        self._reports: deque[StepReport] = deque()
        self._questions: deque[tuple[Callable[[Core], Any], Future[Any]]] = deque()
        self._stopping = False
        self._ended = False
        self._heartbeat = engine.runner.heartbeat
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pagedkv-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._heartbeat.beat()
        self._thread.start()

    def stop(self, timeout_s: float = 60.0) -> None:
        """Ends the thread after the step that it is in, and waits for it."""
        self._stopping = True
        self._engine.edge.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    @property
    def is_alive(self) -> bool:
        """Whether requests are served."""
        return not self._ended and self._thread.is_alive()

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the thread last began a step, a layer of the model, or looked for a step.

        Idle, it stays under IDLE_WAIT_S. A step with a long prompt may take minutes on few cores, a layer of
        it does not.
        """
        return self._heartbeat.age

    def ask(self, question: Callable[[Core], T]) -> Future[T]:
        """Has `question` answered by the engine's thread between two steps, also when idle.

        The future raises what the question raises, or EngineDead if there is no thread to answer.
        """
        future: Future[T] = Future()
        self._questions.append((question, future))
        # Looked at after the append: the thread sets it before it empties the queue for the last time.
        if self._ended:
            self._refuse_questions()
        else:
            self._engine.edge.wake()
        return future

    def _run(self) -> None:
        unchecked = False
        try:
            while not self._stopping:
                self._heartbeat.beat()
                self._answer_questions()
                report = self._engine.step()
                if report is not None and report.num_events:
                    self._reports.append(report)
                self._post_delivered()
                if report is None:
                    if unchecked:
                        self._check_invariants()
                    unchecked = False
                    if not self._engine.use_idle_time():
                        self._engine.edge.wait(IDLE_WAIT_S)
                    continue
                unchecked = True
            reason: BaseException = EngineDead("the engine was shut down")
        except BaseException as error:
            # A panic of the core arrives as a BaseException. Whatever it is, every stream has to hear of it.
            logger.critical("the engine's thread died", exc_info=error)
            self.error = reason = error
        self._ended = True
        self._refuse_questions()
        self._died(reason)

    def _post_delivered(self) -> None:
        while self._reports and self._engine.core.has_delivered(self._reports[0].step_id):
            self._post(self._reports.popleft())

    def _check_invariants(self) -> None:
        """Looks the cache over once the work is done. What it finds is a bug, but not yet a wrong answer."""
        try:
            self._engine.core.check_invariants()
        except RuntimeError as error:
            logger.error("the cache is inconsistent, please report this: %s", error)

    def _answer_questions(self) -> None:
        while self._questions:
            question, future = self._questions.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._engine.ask(question))
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise

    def _refuse_questions(self) -> None:
        while self._questions:
            try:
                _, future = self._questions.popleft()
                future.set_exception(EngineDead("the engine does not run"))
            except (IndexError, InvalidStateError):
                pass  # Another thread refused it first, or the asker gave up.
