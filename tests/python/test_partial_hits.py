"""Matches that end inside a block: what is computed again, and that answers do not change by it."""

from typing import Any

import pytest

from pagedkv import LLM, SamplingParams
from pagedkv.outputs import RequestOutput
from tiny_llm import Checkpoint, assert_at_rest

BLOCK_SIZES = (1, 2, 16, 64, 256)


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def answer(llm: LLM, prompt: list[int], num_tokens: int) -> RequestOutput:
    return llm.generate(prompt, greedy(num_tokens), use_tqdm=False)[0]


def engine(checkpoint: Checkpoint, block_size: int, **options: Any) -> LLM:
    sizes = {"block_size": block_size, "num_blocks": 2048 // block_size, "dtype": "float32"}
    return LLM(**checkpoint.options | sizes | {"max_model_len": 1024} | options)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_exact_repeat_computes_one_token(checkpoint: Checkpoint, block_size: int) -> None:
    llm = engine(checkpoint, block_size)
    for length in (2, 17, 64, 100, 257):
        prompt = [4 + (7 * idx + length) % (checkpoint.vocab_size - 4) for idx in range(length)]
        first, again = answer(llm, prompt, 5), answer(llm, prompt, 5)
        assert first.num_cached_tokens < length - 1 or length == 2
        assert again.num_cached_tokens == length - 1
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert_at_rest(llm)


@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_ten_turns_compute_what_is_new(checkpoint: Checkpoint, block_size: int) -> None:
    llm = engine(checkpoint, block_size)
    plain = engine(checkpoint, block_size, enable_prefix_caching=False)
    prompt, known = list(range(4, 41)), 0
    for turn in range(10):
        output = answer(llm, prompt, 5 + 3 * turn)
        assert len(prompt) - output.num_cached_tokens <= len(prompt) - known + 1
        expected = answer(plain, prompt, 5 + 3 * turn)
        assert expected.num_cached_tokens == 0
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        prompt += output.outputs[0].token_ids
        known = len(prompt)
        prompt += [4 + (13 * turn + idx) % 50 for idx in range(7 + turn)]
    assert_at_rest(llm)


@pytest.mark.parametrize("block_size", [16, 256])
def test_branches_answer_as_without_a_cache(checkpoint: Checkpoint, block_size: int) -> None:
    llm = engine(checkpoint, block_size)
    plain = engine(checkpoint, block_size, enable_prefix_caching=False)
    stem = [4 + (5 * idx) % 60 for idx in range(90)]
    prompts = [[*stem[:cut], 70 + cut, 71, 72, 73] for cut in (90, 89, 75, 50, 49, 33, 32, 31, 16, 3)]
    num_cached = []
    for prompt in prompts:
        output, expected = answer(llm, prompt, 6), answer(plain, prompt, 6)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        num_cached.append(output.num_cached_tokens)
    # Less than two tokens of a block of 16, or eight of 256, are not worth a copy.
    few = [48, 32, 32, 31, 16, 3] if block_size == 16 else [49, 33, 32, 31, 16, 0]
    assert num_cached == [0, 89, 75, 50, *few]
    assert_at_rest(llm)
