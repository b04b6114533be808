"""`detokenize=False`: the same tokens without a text, and nothing asked of the tokenizer."""

from dataclasses import replace

import pytest

from pagedkv import LLM, InvalidRequest, RequestOutput, SamplingParams, streams
from pagedkv.outputs import CompletionOutput
from tiny_llm import GREEDY, assert_at_rest, sampled, texts

PROMPT = [7, 5, 3, 9]


@pytest.fixture
def no_text(monkeypatch):
    """Whoever makes a text or looks a token up fails."""

    def refuse(*_args, **_options):
        raise AssertionError("nobody asked for a text")

    monkeypatch.setattr(streams, "SequenceText", refuse)
    monkeypatch.setattr("pagedkv.text.tokenizer.Tokenizer.token", refuse)
    monkeypatch.setattr("pagedkv.text.tokenizer.Tokenizer.token_bytes", refuse)


def run(llm: LLM, params: SamplingParams) -> RequestOutput:
    """The answers to one prompt."""
    return llm.generate(PROMPT, params, use_tqdm=False)[0]


@pytest.mark.parametrize("params", [GREEDY, sampled(seed=5, n=3), sampled(seed=5, n=2, best_of=4)])
def test_the_tokens_are_the_same_and_the_text_is_empty(llm, params, no_text, monkeypatch):
    silent = run(llm, replace(params, detokenize=False))
    assert [answer.text for answer in silent.outputs] == [""] * params.n
    assert {answer.finish_reason for answer in silent.outputs} == {"length"}
    monkeypatch.undo()
    told = run(llm, params)
    assert texts([silent]) == texts([told])
    assert any(answer.text for answer in told.outputs)
    assert_at_rest(llm)


def test_log_probabilities_are_known_by_their_ids_alone(llm, no_text, monkeypatch):
    silent = run(llm, sampled(seed=5, logprobs=2, detokenize=False)).outputs[0]
    monkeypatch.undo()
    told = run(llm, sampled(seed=5, logprobs=2)).outputs[0]
    assert silent.cumulative_logprob == told.cumulative_logprob
    for mine, other in zip(silent.logprobs, told.logprobs, strict=True):
        assert {token_id: (one.logprob, one.rank) for token_id, one in mine.items()} == {
            token_id: (one.logprob, one.rank) for token_id, one in other.items()
        }
        assert {one.decoded_token for one in mine.values()} == {None}


def test_stop_tokens_end_an_answer_and_stop_strings_are_refused(llm, no_text):
    token_ids = run(llm, replace(GREEDY, detokenize=False)).outputs[0].token_ids
    stop = token_ids[5]
    for included in (False, True):
        params = replace(GREEDY, detokenize=False, stop_token_ids=[stop], include_stop_str_in_output=included)
        answer = run(llm, params).outputs[0]
        assert answer.token_ids == token_ids[: token_ids.index(stop) + 1]
        assert (answer.text, answer.finish_reason, answer.stop_reason) == ("", "stop", stop)
    with pytest.raises(InvalidRequest, match=r"^stop is .*'end'.*, allowed: none where detokenize is false"):
        SamplingParams(stop="end", detokenize=False)


async def test_changes_bring_tokens_without_text(async_llm, no_text):
    stream = async_llm.submit(PROMPT, sampled(seed=5, n=2, logprobs=0, detokenize=False))
    answers = [CompletionOutput(idx, "", []) for idx in range(2)]
    async for changes in stream.changes():
        for change in changes:
            assert (change.text, change.text_offsets) == ("", None)
            assert len(change.logprobs) == len(change.token_ids)
            answers[change.index].token_ids += change.token_ids
            answers[change.index].finish_reason = change.finish_reason
    assert [len(answer.token_ids) for answer in answers] == [12, 12]
    assert {answer.finish_reason for answer in answers} == {"length"}
