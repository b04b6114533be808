"""`AsyncLLM`: streams that grow, clients that leave, an engine that fails, an event loop that goes away."""

import asyncio
import random
import threading
import time
from contextlib import aclosing, asynccontextmanager
from functools import partial

import pytest
import torch

from pagedkv import (
    LLM,
    AsyncLLM,
    EngineDead,
    InvalidRequest,
    QueueFull,
    RequestFailed,
    SamplingParams,
    loading,
)
from tiny_llm import Checkpoint, Greedy, make_checkpoint, prompts

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
# Takes far longer than any test waits, unless it is ended.
LONG = SamplingParams(temperature=0, max_tokens=6000, ignore_eos=True)


def options(checkpoint, **changes):
    return checkpoint.options | {"num_blocks": 2000, "max_model_len": 8000} | changes


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(checkpoint) -> list[Greedy]:
    return [checkpoint.greedy(prompt, NUM_TOKENS) for prompt in prompts(16, checkpoint.vocab_size)]


@pytest.fixture(scope="module")
def shared(checkpoint):
    llm = AsyncLLM(**options(checkpoint))
    yield llm
    asyncio.run(llm.shutdown())
    assert not llm.is_alive


@pytest.fixture
async def llm(shared):
    """The engine that the tests share; each leaves it at rest."""
    yield shared
    await at_rest(shared)


@asynccontextmanager
async def engine(checkpoint, **changes):
    """An engine of the test's own."""
    async with AsyncLLM(**options(checkpoint, **changes)) as llm:
        yield llm


async def at_rest(llm: AsyncLLM, timeout_s: float = 10) -> None:
    """Waits until nothing is in flight, then checks that nothing was leaked."""
    deadline = time.monotonic() + timeout_s
    while (snapshot := await llm.snapshot())["sequences"]:
        assert time.monotonic() < deadline, snapshot["sequences"]
        await asyncio.sleep(0.01)
    assert (snapshot["owned"], snapshot["fenced"]) == (0, 0)
    assert llm.num_in_flight == 0
    await llm.check_invariants()


async def last(outputs):
    """The last item of a stream."""
    output = None
    async for output in outputs:  # noqa: B007 - only the last one matters
        pass
    return output


async def test_outputs_grow_into_the_answer(llm, expected):
    one = expected[0]
    seen_text, seen_ids = "", []
    async for output in llm.generate(one.prompt, GREEDY, "mine"):
        answer = output.outputs[0]
        assert output.request_id == "mine"
        assert answer.text.startswith(seen_text)
        assert answer.token_ids[: len(seen_ids)] == seen_ids
        assert len(answer.token_ids) > len(seen_ids)
        assert output.finished == (answer.finish_reason is not None)
        seen_text, seen_ids = answer.text, answer.token_ids
    assert output.finished
    assert answer.text == llm.tokenizer.decode(one.token_ids)
    one.check(answer)


async def test_64_streams_at_once_equal_their_lone_runs(llm, expected, monkeypatch):
    calls = 0
    loop = asyncio.get_running_loop()
    post = loop.call_soon_threadsafe

    def counted(*arguments, **context):
        nonlocal calls
        calls += 1
        return post(*arguments, **context)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    steps = llm.stats()["steps"]
    asked = [expected[idx % len(expected)] for idx in range(64)]
    outputs = await asyncio.gather(*(last(llm.generate(one.prompt, GREEDY)) for one in asked))
    for output, one in zip(outputs, asked, strict=True):
        one.check(output.outputs[0])
    # The event loop is woken once a step, however many streams there are; at the end a step may only report.
    assert calls <= llm.stats()["steps"] - steps + 2


async def test_several_answers_finish_each_on_its_own(llm):
    params = SamplingParams(temperature=1.5, seed=5, n=3, max_tokens=30, stop=["a", "e"])
    unfinished = set(range(3))
    async for output in llm.generate("the cat", params):
        assert [answer.index for answer in output.outputs] == [0, 1, 2]
        ended = {answer.index for answer in output.outputs if answer.finish_reason is not None}
        assert ended >= set(range(3)) - unfinished
        unfinished -= ended
    assert not unfinished
    assert {answer.finish_reason for answer in output.outputs} <= {"stop", "length"}


async def test_tokens_beyond_a_stop_string_are_dropped_when_the_loop_is_late(llm, checkpoint):
    params = SamplingParams(temperature=1.5, seed=5, n=4, max_tokens=60, ignore_eos=True, stop=["a", "e"])
    offline = LLM(**checkpoint.options)
    truth = offline.generate("the cat", params, use_tqdm=False)[0].outputs
    assert {answer.finish_reason for answer in truth} == {"stop"}
    assert len({len(answer.token_ids) for answer in truth}) > 1
    stream = llm.submit("the cat", params)
    await anext(stream)
    # The engine goes on while the loop is busy, and the news of many steps arrive together.
    time.sleep(0.3)
    output = await last(stream)
    for answer, expected_answer in zip(output.outputs, truth, strict=True):
        assert answer == expected_answer
    await at_rest(llm)


async def test_what_nobody_waited_for_comes_in_one_item(llm, expected):
    stream = llm.submit(expected[1].prompt, GREEDY)
    while llm.num_in_flight:
        await asyncio.sleep(0.01)
    items = [output async for output in stream]
    assert len(items) == 1
    assert items[0].finished
    expected[1].check(items[0].outputs[0])


async def test_leaving_a_generator_early_ends_the_request(llm, expected):
    before = llm.stats()["finished_abort"]
    async with aclosing(llm.generate(expected[0].prompt, LONG)) as outputs:
        async for _ in outputs:
            break
    assert llm.num_in_flight == 0
    await at_rest(llm)
    assert llm.stats()["finished_abort"] == before + 1


async def test_cancelling_the_reader_ends_the_request(llm, expected):
    task = asyncio.create_task(last(llm.generate(expected[0].prompt, LONG)))
    while not llm.num_in_flight:
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await at_rest(llm)
    assert llm.num_in_flight == 0


async def test_abort_by_id_ends_all_requests_of_that_name_and_no_other(llm, expected):
    first, second = (llm.submit(expected[0].prompt, LONG, "same") for _ in range(2))
    other = llm.submit(expected[1].prompt, GREEDY, "other")
    await anext(first)
    assert llm.abort("same") is True
    assert llm.abort("same") is False
    assert llm.abort("nobody") is False
    for stream in (first, second):
        output = await last(stream)
        assert output.request_id == "same"
        assert output.finished
        assert output.outputs[0].finish_reason == "abort"
        assert len(output.outputs[0].token_ids) < 6000
    expected[1].check((await last(other)).outputs[0])


async def test_a_request_id_may_be_used_twice(llm, expected):
    outputs = await asyncio.gather(
        *(last(llm.generate(one.prompt, GREEDY, "same")) for one in expected[:2]),
    )
    for output, one in zip(outputs, expected, strict=False):
        assert output.request_id == "same"
        one.check(output.outputs[0])


async def test_aborting_one_stream_spares_its_namesake(llm, expected):
    first, second = (llm.submit(expected[0].prompt, GREEDY, "same") for _ in range(2))
    first.abort()
    first.abort()
    assert (await last(first)).outputs[0].finish_reason == "abort"
    expected[0].check((await last(second)).outputs[0])


@pytest.mark.parametrize(("num_blocks", "num_clients"), [(400, 200), (64, 100)])
async def test_clients_that_leave_at_random_change_no_other_answer(
    checkpoint, expected, num_blocks, num_clients
):
    rng = random.Random(num_blocks)
    small = {"num_blocks": num_blocks, "max_model_len": None, "block_size": 4, "max_num_batched_tokens": 64}
    async with engine(checkpoint, **small) as llm:
        gate = asyncio.Semaphore(64)

        async def client(one: Greedy, leave_after: int | None) -> None:
            async with gate, aclosing(llm.generate(one.prompt, GREEDY)) as outputs:
                async for output in outputs:
                    if leave_after is not None and len(output.outputs[0].token_ids) >= leave_after:
                        return
            assert output.finished
            one.check(output.outputs[0])

        clients = (
            client(rng.choice(expected), rng.randrange(NUM_TOKENS) if rng.random() < 0.25 else None)
            for _ in range(num_clients)
        )
        await asyncio.gather(*clients)
        await at_rest(llm)
        if num_blocks == 64:
            assert llm.stats()["preemptions"] > 0


async def test_refusals_come_before_anything_runs(llm):
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        llm.submit("")
    with pytest.raises(InvalidRequest, match="This model's maximum context length is 8000 tokens"):
        await anext(llm.generate([5] * 8000, GREEDY))
    assert llm.num_in_flight == 0


async def test_a_full_queue_is_an_error_and_passes(checkpoint, expected, monkeypatch):
    monkeypatch.setattr(loading._core, "Core", partial(loading._core.Core, max_queued_requests=4))
    async with engine(checkpoint) as llm:
        streams = [llm.submit(one.prompt, GREEDY) for one in expected[:4]]
        with pytest.raises(QueueFull):
            llm.submit(expected[4].prompt, GREEDY)
        for stream, one in zip(streams, expected, strict=False):
            one.check((await last(stream)).outputs[0])
        await at_rest(llm)
        expected[4].check((await last(llm.generate(expected[4].prompt, GREEDY))).outputs[0])


async def test_salts_do_not_share_blocks(llm):
    prompt = [9, 8, 7, 6] * 20
    found = []
    for salt in (b"one", b"two", b"one", b""):
        found.append((await last(llm.generate(prompt, GREEDY, salt=salt))).num_cached_tokens)
    assert found == [0, 0, 79, 0]


# Questions to the engine's thread.


async def test_questions_are_answered_idle_and_busy(llm, expected):
    asked_by = await llm.ask(lambda core: threading.current_thread().name)
    assert asked_by == "pagedkv-engine"
    stream = llm.submit(expected[0].prompt, LONG)
    await anext(stream)
    snapshot = await llm.snapshot()
    assert len(snapshot["sequences"]) == 1
    assert snapshot["owned"] > 0
    assert snapshot["owned"] + snapshot["idle"] + snapshot["free"] + snapshot["fenced"] == 2000
    stream.abort()
    await at_rest(llm)
    assert await llm.reset_prefix_cache() > 0
    with pytest.raises(ZeroDivisionError):
        await llm.ask(lambda core: 1 // 0)
    assert llm.is_alive


async def test_an_idle_engine_answers_at_once(llm):
    await asyncio.sleep(0.1)
    start = time.monotonic()
    for _ in range(20):
        await llm.snapshot()
    # Far less than the interval at which an idle thread looks around by itself, 20 times over.
    assert time.monotonic() - start < 2


async def test_the_heart_beats_while_idle_and_shows_a_hanging_step(checkpoint, expected):
    async with engine(checkpoint) as llm:
        for _ in range(5):
            await asyncio.sleep(0.1)
            assert llm.heartbeat_age < 2
        release = threading.Event()
        runner = await llm.ask(lambda core: llm._thread._engine.runner)
        forward = runner.run

        def hanging(header, arena):
            release.wait(30)
            return forward(header, arena)

        runner.run = hanging
        stream = llm.submit(expected[0].prompt, GREEDY)
        # An idle engine never gets there.
        deadline = time.monotonic() + 20
        while llm.heartbeat_age < 0.8:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        release.set()
        expected[0].check((await last(stream)).outputs[0])


# Failures.


async def test_a_step_that_raises_fails_its_requests_only(checkpoint, expected):
    async with engine(checkpoint) as llm:
        runner = llm._thread._engine.runner
        forward, calls = runner.run, []

        def broken(header, arena):
            calls.append(header.num_sequences)
            if len(calls) == 4:
                raise ArithmeticError("a bad step")
            return forward(header, arena)

        runner.run = broken
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


class Panic(BaseException):
    """What a panic of the core looks like: no Exception."""


async def test_a_dead_thread_fails_every_stream_and_says_so(checkpoint, expected, caplog):
    llm = AsyncLLM(**options(checkpoint))
    streams = [llm.submit(one.prompt, LONG) for one in expected[:3]]
    await anext(streams[0])

    def panic(header, arena):
        raise Panic("broken invariant")

    llm._thread._engine.runner.run = panic
    start = time.monotonic()
    for stream in streams:
        with pytest.raises(EngineDead, match="the engine's thread died: Panic: broken invariant"):
            await last(stream)
    assert time.monotonic() - start < 5
    assert not llm.is_alive
    assert llm.num_in_flight == 0
    assert "the engine's thread died" in caplog.text
    with pytest.raises(EngineDead, match="Panic: broken invariant"):
        llm.submit("the cat", GREEDY)
    with pytest.raises(EngineDead):
        await asyncio.wait_for(llm.snapshot(), 5)
    await llm.shutdown()


async def test_a_question_that_panics_is_answered_and_kills_the_engine(checkpoint, expected):
    llm = AsyncLLM(**options(checkpoint))
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
        await asyncio.wait_for(second, 5)
    with pytest.raises(EngineDead, match="Panic: broken invariant"):
        await last(stream)
    await llm.shutdown()


async def test_a_device_that_stays_broken_kills_the_engine(checkpoint, expected):
    llm = AsyncLLM(**options(checkpoint))

    def broken(*_):
        raise ArithmeticError("an illegal access")

    runner = llm._thread._engine.runner
    runner.run = runner.probe = broken
    with pytest.raises(EngineDead, match="an illegal access"):
        await last(llm.generate(expected[0].prompt, GREEDY))
    assert not llm.is_alive
    await llm.shutdown()


async def test_shutdown_ends_what_still_runs(checkpoint, expected):
    llm = AsyncLLM(**options(checkpoint))
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
    llm = AsyncLLM(**options(checkpoint))

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
