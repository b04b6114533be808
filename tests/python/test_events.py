"""Events and their reports on the way from the engine's thread, with a model that computes nothing."""

import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import pytest

from pagedkv import engine as engine_module
from pagedkv._core import Core, Heartbeat
from pagedkv.engine import Engine, EngineThread
from pagedkv.events import ABORT, LENGTH, RUNNING, StepReport
from pagedkv.runner import StepResult

NUM_REQUESTS, MAX_TOKENS = 60, 200


@dataclass
class Launched:
    """A step whose result is known."""

    known: StepResult

    def result(self):
        return self.known


class Runner:
    """Samples the number of the step."""

    def __init__(self):
        self.heartbeat = Heartbeat()
        self.num_steps = 0

    def new_arena(self, num_words):
        return np.zeros(num_words, np.int32)

    def make_ready(self, num_used):
        return False

    def launch(self, header, arena, meanwhile):
        meanwhile()
        self.num_steps += 1
        return Launched(StepResult(np.full(header.num_rows, header.step_id % 1000, np.int32), None))


def new_engine(max_num_seqs=8, overlap=False):
    core = Core(
        num_blocks=400,
        block_size=16,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=256,
        max_model_len=512,
        eos_token_ids=[],
    )
    return Engine(core, Runner(), overlap=overlap)


def submit(engine, number=0):
    prompt = np.arange(1, 21, dtype=np.int32) + number
    return engine.edge.submit(prompt, max_tokens=MAX_TOKENS)


def test_a_report_says_which_events_belong_to_it():
    engine = new_engine()
    first, second = submit(engine), submit(engine, 100)
    report = engine.step()
    assert isinstance(report, StepReport)
    assert report.num_events == 2
    assert engine.events.take(report.step_id) == [
        (first, 0, 0, report.step_id, RUNNING, 0),
        (second, 1, 0, report.step_id, RUNNING, 0),
    ]
    engine.edge.abort(first)
    earlier, later = engine.step(), engine.step()
    assert (earlier.num_events, later.num_events) == (2, 1)
    # Both are in the ring by now, but one step is asked for.
    assert engine.events.take(earlier.step_id) == [
        (first, -1, 0, -1, ABORT, -1),
        (second, 0, 0, earlier.step_id, RUNNING, 0),
    ]
    assert engine.events.take(later.step_id) == [(second, 0, 0, later.step_id, RUNNING, 0)]
    with pytest.raises(RuntimeError, match="the events of this core have a reader"):
        engine.core.open_events()


def test_a_reader_that_sleeps_through_everything_hears_everything(monkeypatch):
    # Only the reader can wake the thread in time.
    monkeypatch.setattr(engine_module, "IDLE_WAIT_S", 3600.0)
    engine = new_engine()
    ids = [submit(engine, number) for number in range(NUM_REQUESTS)]
    reports: deque[StepReport] = deque()
    posted = threading.Semaphore(0)

    def post(report):
        reports.append(report)
        posted.release()

    thread = EngineThread(engine, post, died=lambda reason: None)
    thread.start()
    deadline = time.monotonic() + 60
    while engine.edge.stats()["finished_length"] < NUM_REQUESTS:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    num_posted = len(reports)
    tokens = dict.fromkeys(ids, 0)
    ended = []
    while len(ended) < NUM_REQUESTS:
        assert posted.acquire(timeout=30), "a wake-up was lost"
        report = reports.popleft()
        events = engine.events.take(report.step_id)
        assert len(events) == report.num_events
        for core_id, row, _, token_id, state, _ in events:
            assert (events[row][0], token_id) == (core_id, report.step_id % 1000)
            tokens[core_id] += 1
            if state == LENGTH:
                ended.append(core_id)
    thread.stop()
    assert sorted(ended) == sorted(ids)
    assert sum(tokens.values()) == NUM_REQUESTS * MAX_TOKENS > 10_000
    assert num_posted < engine.runner.num_steps, "all of it fitted, so the test shows nothing"
    assert thread.error is None
