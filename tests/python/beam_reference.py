"""Beam search by transformers, and the comparison of answers with it."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pagedkv import BeamSearchOutput

# Scores that are closer than this may change places: torch's results depend on the batch.
TIE = 2e-4


@torch.inference_mode()
def hf_beams(
    model: PreTrainedModel,
    prompt: Sequence[int],
    width: int,
    max_tokens: int,
    eos: Sequence[int],
    **options: Any,
) -> list[tuple[list[int], float]]:
    """The answers of transformers, each with the prompt and the end token, and their scores."""
    out = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_tokens,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    answers = []
    for ids, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        ends = (place for place in range(len(prompt), len(ids)) if ids[place] in eos)
        end = next(ends, len(prompt) + max_tokens - 1)
        answers.append((ids[: end + 1], score))
    return answers


def check_beams(
    output: BeamSearchOutput, expected: list[tuple[list[int], float]], length_penalty: float
) -> int:
    """Asserts that the answers are the same; returns how many of them end early."""
    assert len(output.sequences) == len(expected)
    prompt_len = len(output.prompt_token_ids)
    for place, (one, (ids, score)) in enumerate(zip(output.sequences, expected, strict=True)):
        assert one.score == pytest.approx(score, abs=TIE)
        near = [other for other, close in expected if abs(close - score) < TIE]
        assert one.tokens in near, f"answer {place}: {one.tokens} is not {ids}"
        num_generated = len(one.tokens) - prompt_len
        assert one.cum_logprob == pytest.approx(one.score * num_generated**length_penalty, rel=1e-5)
    assert len({tuple(one.tokens) for one in output.sequences}) == len(expected)
    return sum(one.finish_reason == "stop" for one in output.sequences)
