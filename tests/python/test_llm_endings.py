"""All that ends an answer, the text that it leaves, and the log-probabilities of its tokens."""

import pytest

from pagedkv import LLM, SamplingParams
from tiny_llm import GREEDY, NUM_TOKENS, sampled


def test_a_stop_string_ends_text_and_tokens(llm, expected):
    tokenizer = llm.tokenizer
    for one in expected[:4]:
        text = tokenizer.decode(one.token_ids)
        # Across the tokens in the middle, so that more than one token makes it up.
        stop = tokenizer.decode(one.token_ids[8:11]).strip("�")
        assert stop
        params = SamplingParams(
            temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop=["no such text", stop]
        )
        answer = llm.generate(one.prompt, params, use_tqdm=False)[0].outputs[0]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
        assert answer.text == text[: text.index(stop)]
        assert answer.token_ids == one.token_ids[: len(answer.token_ids)]
        # The last token is the one that completed it.
        assert stop in tokenizer.decode(answer.token_ids)
        assert stop not in tokenizer.decode(answer.token_ids[:-1])
        kept = SamplingParams(
            temperature=0,
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            stop=stop,
            include_stop_str_in_output=True,
        )
        included = llm.generate(one.prompt, kept, use_tqdm=False)[0].outputs[0]
        assert included.text == answer.text + stop
        assert included.token_ids == answer.token_ids


def test_what_was_computed_beyond_a_stop_string_is_not_counted(llm, expected):
    one = expected[0]
    stop = llm.tokenizer.decode(one.token_ids[4:6]).strip("�")
    before = llm.stats()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop=stop)
    answer = llm.generate(one.prompt, params, use_tqdm=False)[0].outputs[0]
    after = llm.stats()
    assert after["generation_tokens"] - before["generation_tokens"] == len(answer.token_ids) < NUM_TOKENS
    assert after["finished_stop"] - before["finished_stop"] == 1


def test_a_stop_token_ends_the_answer(llm, expected):
    one = expected[2]
    stop = one.token_ids[5]
    first = one.token_ids.index(stop)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=[stop])
    answer = llm.generate(one.prompt, params, use_tqdm=False)[0].outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.token_ids == one.token_ids[: first + 1]
    assert answer.text == llm.tokenizer.decode(one.token_ids[:first])


def test_the_end_token_is_in_the_tokens_and_not_in_the_text(checkpoint, expected, tmp_path):
    one = expected[4]
    eos = one.token_ids[6]
    first = one.token_ids.index(eos)
    llm = LLM(**checkpoint.options | {"model": str(checkpoint.with_eos(tmp_path / "eos", eos))})
    heeded, ignored = llm.generate(
        [one.prompt] * 2, [SamplingParams(temperature=0, max_tokens=NUM_TOKENS), GREEDY], use_tqdm=False
    )
    answer = heeded.outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert answer.token_ids == one.token_ids[: first + 1]
    assert answer.text == llm.tokenizer.decode(one.token_ids[:first])
    assert ignored.outputs[0].finish_reason == "length"
    one.check(ignored.outputs[0])


def test_text_is_the_decoded_tokens(llm):
    for output in llm.generate(["the cat sat", "größer"], sampled(seed=1, n=3), use_tqdm=False):
        for answer in output.outputs:
            assert answer.text == llm.tokenizer.decode(answer.token_ids)


@pytest.mark.parametrize("max_num_batched_tokens", [4, 512])
def test_logprobs_are_the_models_own(checkpoint, expected, max_num_batched_tokens):
    llm = LLM(**checkpoint.options, max_num_batched_tokens=max_num_batched_tokens)
    asked = [None, 0, 3, 20]
    params = [
        SamplingParams(temperature=1.3, top_k=5, seed=idx, max_tokens=6, ignore_eos=True, logprobs=num)
        for idx, num in enumerate(asked)
    ]
    outputs = llm.generate([one.prompt for one in expected[:4]], params, use_tqdm=False)
    for output, num in zip(outputs, asked, strict=True):
        answer = output.outputs[0]
        if num is None:
            assert (answer.logprobs, answer.cumulative_logprob) == (None, None)
            continue
        assert len(answer.logprobs) == len(answer.token_ids) == 6
        truth = checkpoint.logprobs(output.prompt_token_ids + answer.token_ids)[
            len(output.prompt_token_ids) - 1 :
        ]
        for token_id, entry, row in zip(answer.token_ids, answer.logprobs, truth, strict=False):
            assert next(iter(entry)) == token_id
            top = row.topk(max(num, 1)).indices.tolist()[:num]
            assert set(entry) == {token_id, *top}
            for other, logprob in entry.items():
                assert logprob.logprob == pytest.approx(float(row[other]), abs=1e-3)
                assert logprob.decoded_token == llm.tokenizer.token(other)
                assert logprob.rank == (top.index(other) + 1 if other in top else None)
        total = sum(
            entry[token_id].logprob for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True)
        )
        assert answer.cumulative_logprob == pytest.approx(total)
