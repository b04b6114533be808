"""The forms of a prompt, and the refusals that come before anything runs."""

import pytest

from pagedkv import InvalidRequest, SamplingParams
from tiny_llm import GREEDY


def test_every_form_of_a_prompt(llm):
    ids = llm.tokenizer.encode("the cat sat")
    forms = ["the cat sat", {"prompt": "the cat sat"}, ids, tuple(ids), {"prompt_token_ids": ids}]
    expected = llm.generate("the cat sat", GREEDY, use_tqdm=False)[0].outputs[0].text
    for form in forms:
        outputs = llm.generate(form, GREEDY, use_tqdm=False)
        assert [output.outputs[0].text for output in outputs] == [expected]
        assert outputs[0].prompt_token_ids == ids
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [expected] * len(forms)
    assert [output.prompt for output in outputs] == ["the cat sat"] * 2 + [None] * 3
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty, allowed: at least one token"),
        ([[]], "prompt is empty, allowed: at least one token"),
        (5, "prompts is an int, allowed: a text, a list of token ids"),
        (b"bytes", "prompts is a bytes, allowed: a text"),
        (["ok", 5], "prompt is an int, allowed: a text"),
        ([[1, "2"]], "prompt has a str at place 1, allowed: token ids, which are integers"),
        ([[1, True]], "prompt has a bool at place 1, allowed: token ids"),
        ([[1, 2.0]], "prompt has a float at place 1, allowed: token ids"),
        ([[5, 100_000]], "prompt has the token id 100000, allowed: 0.."),
        ([[5, -1]], "prompt has the token id -1, allowed: 0.."),
        ({"text": "x"}, "prompt is a dict with ['text'], allowed: a text"),
        ({"prompt": 5}, "prompt is a dict with ['prompt'], allowed: a text"),
        ("a\ud800b", "prompt cannot be encoded: "),
    ],
)
def test_a_prompt_that_is_none_is_refused(llm, prompt, message):
    before = llm.stats()["steps"]
    with pytest.raises(InvalidRequest) as refusal:
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert str(refusal.value).startswith(message)
    assert llm.stats()["steps"] == before


def test_the_length_of_prompt_and_answer_is_bounded(llm):
    limit = llm.max_model_len
    assert limit == 512

    def run(prompt_len, max_tokens):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        (output,) = llm.generate([[5] * prompt_len], params, use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
        return len(output.outputs[0].token_ids)

    assert run(limit - 1, 1) == 1
    assert run(limit - 1, None) == 1
    assert run(limit - 5, None) == 5
    head = "This model's maximum context length is 512 tokens, but "
    for prompt_len in (limit, limit + 1):
        for max_tokens in (1, None):
            with pytest.raises(InvalidRequest) as refusal:
                run(prompt_len, max_tokens)
            assert str(refusal.value) == (
                f"{head}the prompt has {prompt_len}, which leaves no room for an answer; "
                "allowed: a prompt of at most 511 tokens"
            )
    with pytest.raises(InvalidRequest) as refusal:
        run(limit - 4, 5)
    assert str(refusal.value) == (
        f"{head}513 were requested (508 in the prompt, 5 for the answer); "
        "allowed: max_tokens of at most 4 here"
    )


def test_one_bad_prompt_stops_all_before_any_runs(llm):
    before = llm.stats()["steps"]
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        llm.generate(["fine", ""], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="stop_token_ids has the token id 100000"):
        llm.generate("fine", SamplingParams(stop_token_ids=[100_000]), use_tqdm=False)
    with pytest.raises(
        InvalidRequest, match="sampling_params has 3 entries, allowed: one, or one for each of 2"
    ):
        llm.generate(["a", "b"], [GREEDY] * 3, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="sampling_params is a dict, allowed: SamplingParams"):
        llm.generate("a", {"temperature": 0}, use_tqdm=False)
    assert llm.stats()["steps"] == before
