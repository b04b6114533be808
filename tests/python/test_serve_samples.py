"""Several answers to a prompt over HTTP: drawn ones, the best of many, and those of a beam search."""

from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from fake_engine import events_of, post
from pagedkv import AsyncLLM, BeamSearchParams, SamplingParams
from tiny_llm import last, prompts

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "the cat sat on"}]


async def refused(client: TestClient, path: str, **fields: Any) -> dict[str, Any]:
    response = await client.post(path, json=fields)
    assert response.status == 400
    return dict((await response.json())["error"])


async def test_sixteen_answers_compute_the_prompt_once(client, engine, checkpoint):
    prompt = (prompts(3, checkpoint.vocab_size)[0] * 9)[:100]
    fields = {"prompt": prompt, "seed": 5, "temperature": 1.5, "max_tokens": 9, "ignore_eos": True}
    whole = await post(client, COMPLETIONS, n=16, **fields)
    stats = engine.stats()
    assert (stats["prompt_tokens"], stats["scheduled_tokens"]) == (100, 100 + 16 * 8)
    assert stats["copies"] == 15
    assert whole["usage"]["prompt_tokens"] == 100
    assert whole["usage"]["completion_tokens"] == 16 * 9
    texts = [choice["text"] for choice in whole["choices"]]
    assert len(set(texts)) == 16
    # An answer depends on its seed and its number, not on how many others there are.
    for n in (1, 4):
        fewer = await post(client, COMPLETIONS, n=n, **fields)
        assert [choice["text"] for choice in fewer["choices"]] == texts[:n]
    params = SamplingParams(n=16, seed=5, temperature=1.5, max_tokens=9, ignore_eos=True)
    output = await last(engine.generate(prompt, params))
    assert [answer.text for answer in output.outputs] == texts


async def best_of_five(engine: AsyncLLM) -> list[Any]:
    """All five answers, the likeliest first."""
    params = SamplingParams(n=5, seed=3, temperature=1.5, max_tokens=9, logprobs=1)
    output = await last(engine.generate("the cat", params))
    return sorted(output.outputs, key=lambda answer: -answer.cumulative_logprob)


async def test_best_of_gives_the_likeliest_answers(client, engine):
    ranked = await best_of_five(engine)
    fields = {"prompt": "the cat", "seed": 3, "temperature": 1.5, "max_tokens": 9, "n": 2, "best_of": 5}
    whole = await post(client, COMPLETIONS, **fields)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert [choice["text"] for choice in whole["choices"]] == [answer.text for answer in ranked[:2]]
    assert [choice["logprobs"] for choice in whole["choices"]] == [None, None]
    assert whole["usage"]["completion_tokens"] == sum(len(answer.token_ids) for answer in ranked[:2])
    with_logprobs = await post(client, COMPLETIONS, logprobs=1, **fields)
    for choice, answer in zip(with_logprobs["choices"], ranked, strict=False):
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(answer.cumulative_logprob, abs=1e-4)
    response = await client.post(COMPLETIONS, json=fields | {"stream": True})
    events = events_of(await response.read())
    assert [event["choices"][0]["text"] for event in events] == [answer.text for answer in ranked[:2]]


async def test_best_of_in_python_shows_nothing_before_the_end(engine):
    ranked = await best_of_five(engine)
    params = SamplingParams(n=2, best_of=5, seed=3, temperature=1.5, max_tokens=9)
    outputs = [output async for output in engine.generate("the cat", params)]
    assert [output.finished for output in outputs] == [True]
    assert [answer.token_ids for answer in outputs[0].outputs] == [answer.token_ids for answer in ranked[:2]]
    assert [answer.index for answer in outputs[0].outputs] == [0, 1]
    assert all(answer.logprobs is None for answer in outputs[0].outputs)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_beam_search_over_http_is_that_of_python(client, engine, stream):
    params = BeamSearchParams(4, 8, length_penalty=0.5, early_stopping=True)
    fields = {"n": 4, "max_tokens": 8, "use_beam_search": True, "length_penalty": 0.5, "early_stopping": True}
    text = engine.tokenizer.chat_text(USER, add_generation_prompt=True)
    asked = {
        COMPLETIONS: ({"prompt": "the cat"}, "the cat"),
        CHAT: ({"messages": USER}, engine.tokenizer.encode(text, add_special_tokens=False)),
    }
    for path, (body, prompt) in asked.items():
        output = await engine.beam_search(prompt, params)
        length = len(output.prompt_token_ids)
        expected = [engine.tokenizer.decode(one.tokens[length:]) for one in output.sequences]
        if stream:
            response = await client.post(path, json=fields | body | {"stream": True, "temperature": 0})
            choices = [event["choices"][0] for event in events_of(await response.read())]
            got = [choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices]
        else:
            whole = await post(client, path, **fields, **body)
            choices = whole["choices"]
            got = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
            assert whole["usage"]["prompt_tokens"] == length
            num_generated = sum(len(one.tokens) - length for one in output.sequences)
            assert whole["usage"]["completion_tokens"] == num_generated
        assert got == expected
        assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
        assert [choice["finish_reason"] for choice in choices] == [
            one.finish_reason for one in output.sequences
        ]


async def test_several_prompts_are_searched_side_by_side(client):
    fields = {"n": 2, "max_tokens": 6, "use_beam_search": True}
    one, other = [
        (await post(client, COMPLETIONS, prompt=prompt, **fields))["choices"] for prompt in ("cat", "mat")
    ]
    both = (await post(client, COMPLETIONS, prompt=["cat", "mat"], **fields))["choices"]
    assert [choice["text"] for choice in both] == [choice["text"] for choice in one + other]


async def test_a_search_that_never_fits_names_its_fields(client):
    error = await refused(client, COMPLETIONS, prompt=[5] * 8, n=64, max_tokens=400, use_beam_search=True)
    assert "need up to" in error["message"]
    assert "the cache has 400" in error["message"]
    error = await refused(client, COMPLETIONS, prompt="a", n=2, use_beam_search=True, temperature=0.5)
    assert error["param"] == "temperature"
