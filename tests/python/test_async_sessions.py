"""Sessions and pins while other requests run: one continuation at a time, whoever leaves, however it ends."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from pagedkv import (
    AsyncLLM,
    Conflict,
    EngineDead,
    InvalidRequest,
    NotFound,
    QueueFull,
    RequestFailed,
    SamplingParams,
)
from tiny_llm import GREEDY, LONG, Checkpoint, async_engine, at_rest, last

TURN = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SALTS = (b"", b"one", b"two")


@pytest_asyncio.fixture
async def llm(async_llm: AsyncLLM) -> AsyncIterator[AsyncLLM]:
    """A shared engine, without pins and sessions after the test."""
    yield async_llm
    await clear(async_llm)


async def clear(llm: AsyncLLM) -> None:
    for salt in SALTS:
        for session in await llm.sessions(salt=salt):
            await llm.delete_session(session.id, salt=salt)
        for pin in await llm.pins(salt=salt):
            await llm.unpin(pin.id, salt=salt)


async def turn(llm: AsyncLLM, prompt: Any, **arguments: Any) -> Any:
    params = arguments.pop("params", TURN)
    return await last(llm.generate(prompt, params, **arguments))


async def begun(llm: AsyncLLM, **arguments: Any) -> tuple[Any, asyncio.Task[Any]]:
    """A session, and a long answer that continues it."""
    first = await turn(llm, "the cat sat", session_id="s")
    answer = turn(llm, " on", params=LONG, session_id="s", append=True, **arguments)
    task = asyncio.create_task(answer)
    while not llm.num_in_flight:
        await asyncio.sleep(0)
    return first, task


async def assert_free(llm: AsyncLLM, first: Any) -> None:
    """The session is as the first turn left it, and can be continued."""
    token_ids = first.prompt_token_ids + first.outputs[0].token_ids
    assert await llm.session_token_ids("s") == token_ids
    output = await turn(llm, " on", session_id="s", append=True)
    assert output.prompt_token_ids[: len(token_ids)] == token_ids
    assert llm.stats()["blocks_promised"] == 0


async def test_one_continuation_at_a_time(llm: AsyncLLM) -> None:
    _, task = await begun(llm)
    with pytest.raises(
        Conflict, match='session "s" is being continued by another request; one at a time can'
    ):
        await turn(llm, " on", session_id="s", append=True)
    # A fork is a session of its own, of what there was before.
    fork = await llm.fork_session("s")
    await turn(llm, " on", session_id=fork.id, append=True)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelling_a_continuation_frees_the_session(llm: AsyncLLM) -> None:
    first, task = await begun(llm)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_free(llm, first)


async def test_aborting_a_continuation_frees_the_session(llm: AsyncLLM) -> None:
    first, task = await begun(llm, request_id="mine")
    assert llm.abort("mine")
    assert (await task).outputs[0].finish_reason == "abort"
    await assert_free(llm, first)


async def test_cancelling_at_any_moment_leaves_no_promise(llm: AsyncLLM) -> None:
    first = await turn(llm, "the cat sat", session_id="s")
    for num_turns in range(12):
        task = asyncio.create_task(turn(llm, " on", params=LONG, session_id="s", append=True))
        for _ in range(num_turns):
            await asyncio.sleep(0 if num_turns < 6 else 0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await at_most(llm, 0, "blocks_promised")
    await assert_free(llm, first)


async def at_most(llm: AsyncLLM, most: int, name: str) -> None:
    """Waits until a counter has come down."""
    for _ in range(200):
        await llm.snapshot()
        if llm.stats()[name] <= most:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} is {llm.stats()[name]}")


async def test_a_failed_step_frees_the_session(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    first, task = await begun(llm)
    runner = llm._thread._engine.runner
    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", lambda *_: (_ for _ in ()).throw(ValueError("broken")))
        with pytest.raises(RequestFailed, match="broken"):
            await task
    await assert_free(llm, first)


async def test_a_full_queue_frees_the_session(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await turn(llm, "the cat sat", session_id="s")

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(llm._edge, name)

        def submit(self, *_: Any, **__: Any) -> int:
            raise QueueFull("full")

    with monkeypatch.context() as patch:
        patch.setattr(llm._front, "edge", Full())
        for append in (True, False):
            with pytest.raises(QueueFull):
                await turn(llm, " on", session_id="s", append=append)
        with pytest.raises(QueueFull):
            await llm.pin("the dog")
    await assert_free(llm, first)


async def test_a_dead_engine_says_so(checkpoint: Checkpoint) -> None:
    llm = async_engine(checkpoint)
    await turn(llm, "the cat", session_id="s")
    await llm.shutdown()
    for ask in (
        llm.sessions,
        llm.pins,
        lambda: llm.pin("x"),
        lambda: turn(llm, "x", session_id="s", append=True),
    ):
        with pytest.raises(EngineDead):
            await ask()


async def test_an_answer_that_ended_before_its_stop_string_was_seen(llm: AsyncLLM) -> None:
    whole = (await turn(llm, "the log", params=GREEDY)).outputs[0]
    for place in range(4, len(whole.text) - 4, 5):
        stop = whole.text[place : place + 3]
        # The last token may complete the stop string, or the core may have ended the answer first.
        for num_tokens in (20, 48):
            params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, stop=stop)
            output = await turn(llm, "the log", params=params, session_id="s")
            token_ids = await llm.session_token_ids("s")
            assert token_ids == output.prompt_token_ids + output.outputs[0].token_ids


async def test_tenants_have_sessions_of_their_own(llm: AsyncLLM) -> None:
    outputs = await asyncio.gather(
        *(turn(llm, f"the cat {salt!r}", session_id="s", salt=salt) for salt in SALTS),
    )
    for salt, output in zip(SALTS, outputs, strict=True):
        assert [session.id for session in await llm.sessions(salt=salt)] == ["s"]
        token_ids = output.prompt_token_ids + output.outputs[0].token_ids
        assert await llm.session_token_ids("s", salt=salt) == token_ids
    pin = await llm.pin("the mat", salt=b"one")
    assert (await llm.pins(salt=b"one"), await llm.pins(salt=b"two")) == ([pin], [])
    for ask in (
        llm.unpin(pin.id),
        llm.unpin(pin.id, salt=b"two"),
        llm.session("s", salt=b"three"),
        llm.fork_session("s", "t", salt=b"three"),
        llm.delete_session("s", salt=b"three"),
        turn(llm, "x", session_id="s", append=True, salt=b"three"),
    ):
        with pytest.raises(NotFound):
            await ask
    assert (await llm.lookup("the mat " * 20, salt=b"three")).cached_tokens == 0


async def test_a_pin_that_a_reset_overtook(llm: AsyncLLM) -> None:
    task = asyncio.create_task(llm.pin([4 + place % 200 for place in range(7000)]))
    while not llm.num_in_flight:
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)
    await llm.reset_prefix_cache()
    with pytest.raises(Conflict, match="the cache was reset while the prompt was computed; pin it again"):
        await task
    await at_rest(llm)


class Crowd:
    """Clients of two tenants that do whatever comes to their minds with a few names."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.chance = random.Random(5)
        self.outcomes: Counter[str] = Counter()

    async def client(self, salt: bytes, number: int) -> None:
        """Twelve actions, one after another."""
        for _ in range(12):
            weights = {"continue_": 6, "fork": 4, "delete": 1, "pin": 1, "look": 1, "ask": 1}
            action = self.chance.choices(list(weights), list(weights.values()))[0]
            try:
                await getattr(self, action)(salt, f"s{number % 3}")
                outcome = action
            except (NotFound, Conflict, InvalidRequest) as error:
                outcome = type(error).__name__
            except TimeoutError:
                outcome = "left"
            self.outcomes[outcome] += 1

    def _turn(self, text: str, **arguments: Any) -> Any:
        max_tokens = self.chance.randrange(1, 30)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return turn(self.llm, text, params=params, **arguments)

    def _text(self) -> str:
        return " the cat sat on the mat"[: self.chance.randrange(2, 24)]

    async def continue_(self, salt: bytes, name: str) -> None:
        """Begins or continues a session; may leave in the middle."""
        append = self.chance.random() < 0.7
        answer = self._turn(self._text(), session_id=name, append=append, salt=salt)
        leaves = self.chance.random() < 0.3
        await (asyncio.wait_for(answer, self.chance.random() * 0.02) if leaves else answer)

    async def fork(self, salt: bytes, name: str) -> None:
        await self.llm.fork_session(name, f"t{self.chance.randrange(1000)}", salt=salt)

    async def delete(self, salt: bytes, name: str) -> None:
        await self.llm.delete_session(name, salt=salt)

    async def pin(self, salt: bytes, _name: str) -> None:
        text = "the cat sat on the mat " * self.chance.randrange(1, 12)
        await self.llm.pin(text, self.chance.random() + 0.01, salt=salt)

    async def look(self, salt: bytes, _name: str) -> None:
        await self.llm.lookup(self._text() * 4, salt=salt)

    async def ask(self, salt: bytes, _name: str) -> None:
        await self._turn(self._text() * 3, salt=salt)


async def test_a_pin_that_is_over_at_once_says_so(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    run_kept = llm._run_kept

    async def run_slowly(request: Any) -> None:
        await run_kept(request)
        await asyncio.sleep(0.05)

    monkeypatch.setattr(llm, "_run_kept", run_slowly)
    with pytest.raises(Conflict, match="the pin is gone already: its ttl is over"):
        await llm.pin("the cat sat", 0.01)
    assert await llm.pins() == []


async def test_everything_at_once(checkpoint: Checkpoint) -> None:
    llm = async_engine(checkpoint, num_blocks=300, max_model_len=600, max_num_seqs=12)
    crowd = Crowd(llm)

    async def disturb() -> None:
        for _ in range(6):
            await asyncio.sleep(0.1)
            await llm.check_invariants()
            await llm.reset_prefix_cache()

    clients = (crowd.client(salt, number) for salt in (b"one", b"two") for number in range(6))
    await asyncio.gather(disturb(), *clients)
    assert {"continue_", "Conflict", "NotFound", "left", "fork", "pin"} <= crowd.outcomes.keys()
    while llm.num_in_flight:
        await asyncio.sleep(0.01)
    await at_most(llm, 0, "blocks_promised")
    for salt in (b"one", b"two"):
        for session in await llm.sessions(salt=salt):
            token_ids = await llm.session_token_ids(session.id, salt=salt)
            alone = await turn(llm, token_ids)
            output = await turn(llm, "", session_id=session.id, append=True, salt=salt)
            assert output.prompt_token_ids == token_ids
            assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    await llm.check_invariants()
    await clear(llm)
    await at_rest(llm)
    await llm.shutdown()
