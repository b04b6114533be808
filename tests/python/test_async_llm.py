"""`AsyncLLM`: streams that grow, clients that leave, refusals."""

import asyncio
import random
import threading
import time
from contextlib import aclosing
from functools import partial

import pytest

from pagedkv import (
    LLM,
    InvalidRequest,
    QueueFull,
    SamplingParams,
    loading,
)
from tiny_llm import GREEDY, LONG, NUM_TOKENS, Greedy, async_engine, at_rest, last


@pytest.fixture
def llm(async_llm):
    return async_llm


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
    # The engine computes while the loop is busy, and the news of many steps arrive together.
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
    async with async_engine(checkpoint, **small) as llm:
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


async def test_the_least_priority_is_served_first(checkpoint, expected):
    async with async_engine(checkpoint, max_num_seqs=1) as llm:
        order: list[int] = []

        async def client(priority: int) -> None:
            stream = llm.submit(expected[0].prompt, GREEDY, priority=priority)
            expected[0].check((await last(stream)).outputs[0])
            order.append(priority)

        await asyncio.gather(*(client(priority) for priority in (0, 7, -2, 3)))
    # The first one may have been admitted before the others came.
    assert [priority for priority in order if priority != 0] == [-2, 3, 7]
    with pytest.raises(InvalidRequest, match="priority is 2147483648"):
        llm.prepare("a", priority=2**31)


async def test_parameters_of_another_type_are_named(llm):
    for wrong in ({"n": 1}, {}, [SamplingParams()]):
        with pytest.raises(TypeError, match=r"^sampling_params is of type (dict|list), allowed: Sampl"):
            llm.submit("x", wrong)
        with pytest.raises(TypeError, match=r"^sampling_params is of type"):
            await last(llm.generate("x" * 5000, wrong))


async def test_long_texts_are_prepared_beside_the_loop(llm, monkeypatch):
    threads = []
    encode = llm.tokenizer.encode

    def watched(*arguments):
        threads.append(threading.current_thread())
        return encode(*arguments)

    monkeypatch.setattr(llm.tokenizer, "encode", watched)
    text = "the cat sat " * 400
    params = SamplingParams(max_tokens=1)
    output = await last(llm.generate(text, params))
    assert output.prompt_token_ids == encode(text)
    await last(llm.generate({"prompt": "the cat"}, params))
    assert [thread is threading.current_thread() for thread in threads] == [False, True]
    with pytest.raises(InvalidRequest, match="the prompt has at least"):
        await last(llm.generate("x" * 10_000_000, params))
    assert len(threads) == 2


async def test_refusals_come_before_anything_runs(llm):
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        llm.submit("")
    with pytest.raises(InvalidRequest, match="This model's maximum context length is 8000 tokens"):
        await anext(llm.generate([5] * 8000, GREEDY))
    assert llm.num_in_flight == 0


async def test_a_full_queue_is_an_error_and_passes(checkpoint, expected, monkeypatch):
    monkeypatch.setattr(loading._core, "Core", partial(loading._core.Core, max_queued_requests=4))
    async with async_engine(checkpoint) as llm:
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
