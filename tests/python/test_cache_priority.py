"""Requests that say that their blocks are worth little, through Python and through HTTP."""

from typing import Any

import pytest

from fake_engine import serving
from pagedkv import LLM, BeamSearchParams, InvalidRequest, SamplingParams
from tiny_llm import Checkpoint, async_engine, at_rest

# Four blocks of 16 tokens each, with nothing in common.
PROMPTS = [[4 + (11 * idx + 17 * number) % 90 for idx in range(60)] for number in range(4)]
SHORT: dict[str, Any] = {"temperature": 0, "max_tokens": 2, "ignore_eos": True}


@pytest.mark.parametrize("low", [False, True])
def test_low_goes_first(checkpoint: Checkpoint, low: bool) -> None:
    llm = LLM(**checkpoint.options | {"num_blocks": 12, "max_model_len": 128})
    for number, prompt in enumerate(PROMPTS):
        priority: Any = "low" if low and number == 1 else "normal"
        llm.generate(prompt, SamplingParams(**SHORT, cache_priority=priority), use_tqdm=False)
    found = [llm.lookup(prompt).cached_tokens for prompt in PROMPTS]
    assert found == ([59, 0, 59, 59] if low else [0, 59, 59, 59])
    llm.check_invariants()


def test_several_answers_may_be_worth_little(checkpoint: Checkpoint) -> None:
    """Only what each has by itself goes first; what they share is in use by others."""
    llm = LLM(**checkpoint.options | {"num_blocks": 16, "max_model_len": 128})
    for number, prompt in enumerate(PROMPTS * 2):
        if number % 2:
            params = BeamSearchParams(beam_width=2, max_tokens=8, ignore_eos=True, cache_priority="low")
            assert len(llm.beam_search([prompt], params)[0].sequences) == 2
        else:
            samples = SamplingParams(**SHORT | {"max_tokens": 20}, n=3, cache_priority="low")
            assert len(llm.generate(prompt, samples, use_tqdm=False)[0].outputs) == 3
        llm.check_invariants()
    # The last one is still there, whoever came before it.
    assert llm.lookup(PROMPTS[-1]).cached_tokens >= 48


@pytest.mark.parametrize("wrong", ["high", "", None, 1, ["low"]])
def test_only_known_priorities(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match=r'cache_priority is .*, allowed: "normal" or "low"'):
        SamplingParams(cache_priority=wrong)
    with pytest.raises(InvalidRequest, match="cache_priority"):
        BeamSearchParams(beam_width=2, cache_priority=wrong)


async def test_through_http(checkpoint: Checkpoint) -> None:
    engine = async_engine(checkpoint, num_blocks=12, max_model_len=128)
    async with serving(engine) as client:
        for number, prompt in enumerate(PROMPTS):
            body = {"prompt": prompt, **SHORT, "cache_priority": "low" if number == 1 else "normal"}
            response = await client.post("/v1/completions", json=body)
            assert response.status == 200
        found = [(await engine.lookup(prompt)).cached_tokens for prompt in PROMPTS]
        assert found == [59, 0, 59, 59]
        for wrong in ("high", 1, True):
            body = {"prompt": "x", "cache_priority": wrong}
            response = await client.post("/v1/completions", json=body)
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "cache_priority"
        await at_rest(engine)
        await engine.shutdown()
