"""`Stream.changes`: what is new adds up to the answers, whenever somebody looks."""

import time

import pytest

from pagedkv import (
    SamplingParams,
)
from pagedkv.outputs import CompletionOutput, SampleChange
from pagedkv.text import Detokenizer
from tiny_llm import GREEDY, LONG, last


@pytest.fixture
def llm(async_llm):
    return async_llm


def added(change: SampleChange, answer: CompletionOutput) -> CompletionOutput:
    """An answer after a change of it."""
    assert answer.finish_reason is None, "nothing comes after the end"
    assert change.text or change.token_ids or change.finish_reason is not None
    logprobs = None if change.logprobs is None else (answer.logprobs or []) + change.logprobs
    return CompletionOutput(
        answer.index,
        answer.text + change.text,
        answer.token_ids + change.token_ids,
        change.finish_reason,
        change.stop_reason,
        logprobs,
        answer.cumulative_logprob,
    )


@pytest.mark.parametrize("late_s", [0, 0.2])
@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 2}, {"stop": ["a", "e"]}, {"stop": ["a"], "include_stop_str_in_output": True}]
)
async def test_changes_add_up_to_the_answers(llm, fields, late_s):
    params = SamplingParams(temperature=1.5, seed=5, n=3, max_tokens=40, **fields)
    truth = await last(llm.generate("the cat", params))
    answers = {idx: CompletionOutput(idx, "", []) for idx in range(3)}
    stream = llm.submit("the cat", params)
    num_items = 0
    async for changes in stream.changes():
        if num_items == 0:
            # The engine goes on while the loop is busy, and the news of many steps arrive together.
            time.sleep(late_s)
        num_items += 1
        assert len({change.index for change in changes}) == len(changes) > 0
        for change in changes:
            answers[change.index] = added(change, answers[change.index])
    # Answers that a stop string ends are a few tokens long, which can all be there when the loop wakes up.
    assert num_items > 1 or "stop" in fields
    for expected_answer in truth.outputs:
        answer = answers[expected_answer.index]
        answer.cumulative_logprob = expected_answer.cumulative_logprob
        assert answer == expected_answer
    assert stream.prompt_token_ids == truth.prompt_token_ids
    assert stream.num_cached_tokens <= len(truth.prompt_token_ids)
    times = stream.metrics
    assert times.arrival_time < times.first_token_time <= times.last_token_time <= times.finished_time


async def test_text_offsets_say_where_the_text_of_a_token_begins(llm):
    """The tiny model's answers are full of parts of characters, whole ones, and special tokens."""
    for fields in ({}, {"skip_special_tokens": False}, {"stop": ["a", "e"]}):
        params = SamplingParams(temperature=2.0, seed=3, n=4, max_tokens=40, logprobs=0, **fields)
        stream = llm.submit("the cat", params)
        texts, token_ids, offsets = [""] * 4, [[] for _ in range(4)], [[] for _ in range(4)]
        async for changes in stream.changes():
            for change in changes:
                assert len(change.text_offsets) == len(change.token_ids)
                texts[change.index] += change.text
                token_ids[change.index] += change.token_ids
                offsets[change.index] += change.text_offsets
        for text, ids, found in zip(texts, token_ids, offsets, strict=True):
            detokenizer = Detokenizer(llm.tokenizer, params.skip_special_tokens, at_start=False)
            num_chars, num_whole = 0, 0
            for token_id, offset in zip(ids, found, strict=True):
                token, new = llm.tokenizer.token(token_id), detokenizer.add([token_id])
                # What was the first part of a character, and has now become U+FFFD, is before the token.
                assert offset - num_chars in (0, 1)
                num_chars += len(new)
                if new and "\ufffd" not in token:
                    num_whole += 1
                    # A stop string, and what came with it, is not part of the answer.
                    assert text.startswith(token, offset) or params.stop
            assert num_whole > 0


async def test_changes_tell_what_was_found_and_an_abort(llm, expected):
    prompt = [7, 5, 3] * 20
    await last(llm.generate(prompt, GREEDY))
    stream = llm.submit(prompt, LONG)
    taken = []
    async for changes in stream.changes():
        taken += changes
        if len(taken) == 2:
            assert stream.num_cached_tokens == 59
            stream.abort()
    assert [change.finish_reason for change in taken[:2]] == [None, None]
    assert taken[-1].finish_reason == "abort"
    assert len(stream.prompt_token_ids) == 60
