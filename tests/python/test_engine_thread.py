"""The engine's thread: questions, heartbeat, steps that raise, its death, an event loop that goes away."""

import asyncio
import threading
import time

import pytest

from pagedkv import (
    EngineDead,
    RequestFailed,
    SamplingParams,
)
from pagedkv import engine as engine_module
from tiny_llm import GREEDY, LONG, async_engine, at_rest, last


@pytest.fixture
def llm(async_llm):
    return async_llm


class Watched:
    """A core that counts how often it was checked, and may claim to be broken."""

    def __init__(self, core):
        self.core, self.num_checks, self.broken = core, 0, False

    def __getattr__(self, name):
        return getattr(self.core, name)

    def check_invariants(self):
        self.num_checks += 1
        if self.broken:
            raise RuntimeError("a block too many")
        self.core.check_invariants()


async def test_questions_are_answered_idle_and_busy(llm, expected):
    asked_by = await llm.ask(lambda core: threading.current_thread().name)
    assert asked_by == "pagedkv-engine"
    stream = llm.submit(expected[0].prompt * 4, LONG)
    await anext(stream)
    snapshot = await llm.snapshot()
    assert len(snapshot["sequences"]) == 1
    assert snapshot["owned"] > 0
    assert snapshot["owned"] + snapshot["idle"] + snapshot["free"] + snapshot["fenced"] == 2000
    stream.abort()
    await at_rest(llm)
    assert (await llm.reset_prefix_cache()).blocks > 0
    with pytest.raises(ZeroDivisionError):
        await llm.ask(lambda core: 1 // 0)
    assert llm.is_alive


async def test_a_question_wakes_an_idle_engine(llm, monkeypatch):
    # Left alone, the thread would not look around again within the time of this test.
    monkeypatch.setattr(engine_module, "IDLE_WAIT_S", 3600.0)
    for _ in range(20):
        await llm.snapshot()


async def test_the_cache_is_checked_when_the_work_is_done(checkpoint, expected, caplog):
    async with async_engine(checkpoint) as llm:
        core = Watched(llm._thread._engine.core)
        llm._thread._engine.core = core
        expected[0].check((await last(llm.generate(expected[0].prompt, GREEDY))).outputs[0])
        while not core.num_checks:
            await asyncio.sleep(0.01)
        await at_rest(llm)
        num_checks = core.num_checks
        heart = llm._thread._engine.runner.heartbeat
        num_beats = heart.num_beats
        while heart.num_beats == num_beats:
            await asyncio.sleep(0.01)
        assert core.num_checks == num_checks, "nothing was done since the last check"
        assert not caplog.records
        core.broken = True
        expected[1].check((await last(llm.generate(expected[1].prompt, GREEDY))).outputs[0])
        while not caplog.records:
            await asyncio.sleep(0.01)
        assert "the cache is inconsistent, please report this: a block too many" in caplog.text
        expected[2].check((await last(llm.generate(expected[2].prompt, GREEDY))).outputs[0])
        assert llm.is_alive


async def test_the_heart_beats_while_idle_and_shows_a_hanging_step(checkpoint, expected):
    async with async_engine(checkpoint) as llm:
        heart = llm._thread._engine.runner.heartbeat
        for _ in range(3):
            num_beats = heart.num_beats
            while heart.num_beats == num_beats:
                await asyncio.sleep(0.01)
        release = threading.Event()
        runner = await llm.ask(lambda core: llm._thread._engine.runner)
        forward = runner.launch

        def hanging(header, arena, meanwhile):
            release.wait(30)
            return forward(header, arena, meanwhile)

        runner.launch = hanging
        stream = llm.submit(expected[0].prompt, GREEDY)
        # An idle engine never gets there.
        deadline = time.monotonic() + 20
        while llm.heartbeat_age < 0.8:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        release.set()
        expected[0].check((await last(stream)).outputs[0])


async def test_the_heart_beats_within_a_step(checkpoint, expected):
    async with async_engine(checkpoint) as llm:
        runner = llm._thread._engine.runner
        forward, beats = runner.launch, []

        def counted(header, arena, meanwhile):
            before = runner.heartbeat.num_beats
            result = forward(header, arena, meanwhile)
            beats.append(runner.heartbeat.num_beats - before)
            return result

        runner.launch = counted
        params = SamplingParams(temperature=0, max_tokens=1)
        await last(llm.generate(expected[0].prompt, params))
        assert beats == [2], "once for each layer"


async def test_a_step_that_raises_fails_its_requests_only(checkpoint, expected):
    async with async_engine(checkpoint) as llm:
        runner = llm._thread._engine.runner
        forward, calls = runner.launch, []

        def broken(header, arena, meanwhile):
            calls.append(header.num_sequences)
            if len(calls) == 4:
                raise ArithmeticError("a bad step")
            return forward(header, arena, meanwhile)

        runner.launch = broken
        results = await asyncio.gather(
            *(last(llm.generate(one.prompt, GREEDY)) for one in expected), return_exceptions=True
        )
        failed = [result for result in results if isinstance(result, RequestFailed)]
        assert len(failed) == calls[3] > 0
        assert "ArithmeticError: a bad step" in str(failed[0])
        for result, one in zip(results, expected, strict=True):
            if not isinstance(result, RequestFailed):
                one.check(result.outputs[0])
        assert llm.is_alive
        await at_rest(llm)
        expected[0].check((await last(llm.generate(expected[0].prompt, GREEDY))).outputs[0])


async def test_a_text_that_cannot_be_made_fails_its_request_only(llm, expected, monkeypatch):
    before = llm.stats()["finished_abort"]
    good, bad = llm.submit(expected[0].prompt, GREEDY), llm.submit(expected[1].prompt, LONG)

    def broken(token_id):
        raise ArithmeticError("a bad token")

    monkeypatch.setattr(bad._state.samples[0], "text", type("Broken", (), {"add": staticmethod(broken)}))
    with pytest.raises(RequestFailed, match="its text failed: ArithmeticError: a bad token"):
        await last(bad)
    expected[0].check((await last(good)).outputs[0])
    await at_rest(llm)
    assert llm.stats()["finished_abort"] == before + 1


async def test_a_text_that_fails_while_another_sample_ends_leaves_nothing(llm, expected, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=1, n=3)
    bad = llm.submit(expected[1].prompt, params)

    def broken(token_id):
        raise ArithmeticError("a bad token")

    # The first of three samples that all end in the same step.
    monkeypatch.setattr(bad._state.samples[0], "text", type("Broken", (), {"add": staticmethod(broken)}))
    with pytest.raises(RequestFailed, match="ArithmeticError: a bad token"):
        await last(bad)
    assert bad._state.finished
    assert bad._state not in list(llm._front.streams)
    await at_rest(llm)


async def test_an_engine_that_ends_during_the_first_submit_fails_its_stream(
    checkpoint, expected, monkeypatch
):
    async with async_engine(checkpoint) as llm:
        prepare = llm._front.request

        def late(*arguments, **keywords):
            request = prepare(*arguments, **keywords)
            llm._thread.stop()
            return request

        monkeypatch.setattr(llm._front, "request", late)
        with pytest.raises(EngineDead, match="the engine was shut down"):
            await last(llm.submit(expected[0].prompt, GREEDY))
        assert llm.num_in_flight == 0


class Panic(BaseException):
    """What a panic of the core looks like: no Exception."""


async def test_a_dead_thread_fails_every_stream_and_says_so(checkpoint, expected, caplog):
    llm = async_engine(checkpoint)
    streams = [llm.submit(one.prompt, LONG) for one in expected[:3]]
    await anext(streams[0])

    def panic(header, arena, meanwhile):
        raise Panic("broken invariant")

    llm._thread._engine.runner.launch = panic
    for stream in streams:
        with pytest.raises(EngineDead, match="the engine's thread died: Panic: broken invariant"):
            await last(stream)
    assert not llm.is_alive
    assert llm.num_in_flight == 0
    assert "the engine's thread died" in caplog.text
    with pytest.raises(EngineDead, match="Panic: broken invariant"):
        llm.submit("the cat", GREEDY)
    with pytest.raises(EngineDead):
        await llm.snapshot()
    await llm.shutdown()


async def test_a_question_that_panics_is_answered_and_kills_the_engine(checkpoint, expected):
    llm = async_engine(checkpoint)
    stream = llm.submit(expected[0].prompt, LONG)

    asked = threading.Event()

    def panic(core):
        asked.wait(30)
        raise Panic("broken invariant")

    first, second = asyncio.create_task(llm.ask(panic)), asyncio.create_task(llm.snapshot())
    await asyncio.sleep(0.05)
    asked.set()
    with pytest.raises(Panic):
        await first
    with pytest.raises(EngineDead):
        await second
    with pytest.raises(EngineDead, match="Panic: broken invariant"):
        await last(stream)
    await llm.shutdown()


async def test_a_device_that_stays_broken_kills_the_engine(checkpoint, expected):
    llm = async_engine(checkpoint)

    def broken(*_):
        raise ArithmeticError("an illegal access")

    runner = llm._thread._engine.runner
    runner.launch = runner.probe = broken
    with pytest.raises(EngineDead, match="an illegal access"):
        await last(llm.generate(expected[0].prompt, GREEDY))
    assert not llm.is_alive
    await llm.shutdown()


async def test_shutdown_ends_what_still_runs(checkpoint, expected):
    llm = async_engine(checkpoint)
    stream = llm.submit(expected[0].prompt, LONG)
    await anext(stream)
    await llm.shutdown()
    with pytest.raises(EngineDead, match="the engine was shut down"):
        await last(stream)
    assert not llm.is_alive
    with pytest.raises(EngineDead, match="the engine was shut down"):
        await anext(llm.generate("the cat", GREEDY))
    await llm.shutdown()


def test_a_loop_that_went_away_leaves_nothing_behind(checkpoint, expected):
    llm = async_engine(checkpoint)

    async def leave():
        streams = [llm.submit(one.prompt, LONG) for one in expected[:3]]
        await anext(streams[0])

    async def return_later():
        expected[0].check((await last(llm.generate(expected[0].prompt, GREEDY))).outputs[0])
        await at_rest(llm)
        await llm.shutdown()

    asyncio.run(leave())
    # The engine notices by itself that nobody hears its news.
    deadline = time.monotonic() + 10
    while llm.stats()["finished_abort"] < 3:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    asyncio.run(return_later())


async def test_two_loops_at_once_are_refused(llm, expected):
    stream = llm.submit(expected[0].prompt, LONG)

    async def submit():
        llm.submit("the cat", GREEDY)

    with pytest.raises(RuntimeError, match="requests in flight on another event loop"):
        await asyncio.to_thread(asyncio.run, submit())
    stream.abort()
