"""Steps launched before the one before them is committed: the same answers, whatever ends meanwhile."""

import asyncio
from collections.abc import Iterator

import pytest

from pagedkv import LLM, AsyncLLM, BeamSearchParams, RequestFailed, SamplingParams
from pagedkv.events import ABORT, LENGTH
from test_events import new_engine, submit
from tiny_llm import (
    EOS,
    GREEDY,
    LONG,
    NUM_TOKENS,
    Checkpoint,
    assert_at_rest,
    check_all,
    last,
    sampled,
    texts,
)


@pytest.fixture(scope="module")
def shared_ahead(checkpoint: Checkpoint) -> LLM:
    return LLM(**checkpoint.options, seed=11, overlap=True)


@pytest.fixture
def ahead(shared_ahead: LLM) -> Iterator[LLM]:
    """An engine whose steps overlap; each test leaves it at rest."""
    yield shared_ahead
    assert_at_rest(shared_ahead)


def test_greedy_answers_are_those_of_transformers(ahead, expected):
    before = ahead.stats()
    check_all(ahead, expected)
    after = ahead.stats()
    # All of them end by their length, which is known before.
    assert after["void_rows"] == before["void_rows"]
    assert after["generation_tokens"] - before["generation_tokens"] == NUM_TOKENS * len(expected)


def test_drawn_answers_and_their_logprobs_are_the_same(ahead, llm, expected):
    asked = [
        sampled(seed=number, n=1 + number % 3, logprobs=number % 4 if number % 2 else None)
        for number in range(len(expected))
    ]
    prompts = [one.prompt for one in expected]
    together, alone = [engine.generate(prompts, asked, use_tqdm=False) for engine in (ahead, llm)]
    assert texts(together) == texts(alone)
    for one, other in zip(together, alone, strict=True):
        for answer, same in zip(one.outputs, other.outputs, strict=True):
            assert answer.logprobs == same.logprobs


@pytest.mark.parametrize("place", range(0, 12))
def test_a_stop_token_at_every_place_voids_one_row(ahead, expected, place):
    one = expected[0]
    stop = one.token_ids[place]
    end = one.token_ids.index(stop) + 1
    before = ahead.stats()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=[stop])
    (output,) = ahead.generate([one.prompt], params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids == one.token_ids[:end]
    after = ahead.stats()
    assert after["void_rows"] - before["void_rows"] == 1
    assert after["generation_tokens"] - before["generation_tokens"] == end


def test_a_stop_string_ends_text_and_tokens(ahead, llm, expected):
    for one in expected[:4]:
        stop = llm.tokenizer.decode(one.token_ids[8:11]).strip("�")
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop=[stop])
        answer, same = (
            engine.generate(one.prompt, params, use_tqdm=False)[0].outputs[0] for engine in (ahead, llm)
        )
        assert (answer.text, answer.token_ids, answer.stop_reason) == (same.text, same.token_ids, stop)


def test_beams_and_sessions_are_the_same(ahead, llm, expected):
    params = BeamSearchParams(4, 12)
    prompts = [one.prompt for one in expected[:3]]
    searches = [engine.beam_search(prompts, params) for engine in (ahead, llm)]
    found = [[[beam.tokens for beam in output.sequences] for output in search] for search in searches]
    assert found[0] == found[1]
    stop = [expected[1].token_ids[5]]
    ending = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=stop)
    turns = []
    for engine in (ahead, llm):
        first = engine.generate([expected[1].prompt], ending, session_id="s", use_tqdm=False)
        second = engine.generate([[5, 6, 7]], GREEDY, session_id="s", append=True, use_tqdm=False)
        turns.append((texts(first), texts(second), second[0].num_cached_tokens))
        engine.delete_session("s")
    assert turns[0] == turns[1]


def test_answers_survive_a_cache_that_is_too_small(checkpoint, llm, expected):
    options = checkpoint.options | {"num_blocks": 24, "max_model_len": 160, "block_size": 8}
    prompts = [one.prompt for one in expected]
    outputs = {}
    for overlap in (False, True):
        tight = LLM(**options, overlap=overlap)
        outputs[overlap] = texts(tight.generate(prompts, GREEDY, use_tqdm=False))
        assert tight.stats()["preemptions"] > 0
        assert_at_rest(tight)
    assert outputs[True] == outputs[False] == texts(llm.generate(prompts, GREEDY, use_tqdm=False))


@pytest.mark.parametrize("call", ["launch", "result"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ArithmeticError])
def test_a_failure_anywhere_leaves_the_engine_usable(checkpoint, expected, monkeypatch, call, error):
    llm = LLM(**checkpoint.options, overlap=True)
    launch, calls = llm._engine.runner.launch, []

    class Broken:
        def result(self):
            raise error

    def broken(header, arena, meanwhile):
        calls.append(header.step_id)
        launched = launch(header, arena, meanwhile)
        if len(calls) == 5:
            if call == "launch":
                raise error
            return Broken()
        return launched

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.runner, "launch", broken)
        with pytest.raises((RequestFailed, KeyboardInterrupt)):
            llm.generate([one.prompt for one in expected], GREEDY, use_tqdm=False)
    assert_at_rest(llm)
    check_all(llm, expected)


def test_reports_announce_every_event_once():
    engine = new_engine(overlap=True)
    first, second = submit(engine), submit(engine, 100)
    seen = []
    for number in range(400):
        report = engine.step()
        if report is None:
            break
        events = engine.events.take(report.step_id)
        assert len(events) == report.num_events
        assert all(row < 0 or token == report.step_id % 1000 for _, row, _, token, _, _ in events)
        seen += events
        if number == 5:
            assert engine.core.num_in_flight == 1
            engine.edge.abort(first)
    ends = [(core_id, state) for core_id, _, _, _, state, _ in seen if state]
    assert ends == [(first, ABORT), (second, LENGTH)]
    assert sum(row >= 0 for core_id, row, *_ in seen if core_id == second) == 200
    assert engine.edge.stats()["void_rows"] == 1


async def test_clients_leave_while_steps_overlap(checkpoint, expected):
    async with AsyncLLM(
        **checkpoint.options | {"num_blocks": 2000, "max_model_len": 8000}, overlap=True
    ) as llm:
        leaving = [llm.submit(one.prompt, LONG) for one in expected[:3]]
        for stream in leaving:
            await anext(stream)
        staying = [asyncio.create_task(last(llm.generate(one.prompt, GREEDY))) for one in expected[3:]]
        for stream in leaving:
            stream.abort()
        for task, one in zip(staying, expected[3:], strict=True):
            one.check((await task).outputs[0])
        while (snapshot := await llm.snapshot())["owned"] + snapshot["fenced"]:
            await asyncio.sleep(0.01)
        assert snapshot["sequences"] == []
        await llm.check_invariants()


def test_an_end_token_is_no_ordinary_token(checkpoint, expected, tmp_path):
    one = expected[2]
    eos = one.token_ids[3]
    path = checkpoint.with_eos(tmp_path / "ending", eos)
    assert eos != EOS
    llm = LLM(**checkpoint.options | {"model": str(path)}, overlap=True)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    (output,) = llm.generate([one.prompt], params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert (
        output.outputs[0].token_ids[: one.token_ids.index(eos)] == one.token_ids[: one.token_ids.index(eos)]
    )
    assert llm.stats()["void_rows"] == 1
    assert_at_rest(llm)
