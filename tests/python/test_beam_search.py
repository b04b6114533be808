"""Beam search: the answers of transformers, through Python, whatever else runs and is preempted."""

import asyncio
import json
from itertools import pairwise

import pytest
import torch

from beam_reference import check_beams, hf_beams
from pagedkv import LLM, AsyncLLM, BeamSearchParams, InvalidRequest, SamplingParams
from pagedkv.candidates import likeliest
from tiny_llm import EOS, LONG, Checkpoint, assert_at_rest, at_rest, prompts

MAX_TOKENS = 14


@pytest.fixture(scope="module")
def end_tokens(checkpoint: Checkpoint) -> list[int]:
    """Tokens that the likeliest answers to `asked` hold, so that searches which end at them do end."""
    seen: dict[int, int] = {}
    for prompt in asked(checkpoint):
        for ids, _ in hf_beams(checkpoint.reference, prompt, 4, MAX_TOKENS, []):
            for token_id in ids[len(prompt) + 2 :]:
                seen[token_id] = seen.get(token_id, 0) + 1
    return sorted(sorted(seen, key=lambda token_id: -seen[token_id])[2:5])


@pytest.fixture(scope="module")
def ending(checkpoint: Checkpoint, end_tokens: list[int], tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """An engine whose model ends at any of several tokens."""
    path = checkpoint.with_eos(tmp_path_factory.mktemp("ending") / "model", EOS)
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(fields | {"eos_token_id": [EOS, *end_tokens]}))
    return LLM(**checkpoint.options | {"model": str(path)})


def asked(checkpoint: Checkpoint) -> list[list[int]]:
    """Prompts of different lengths."""
    return [
        prompt[:length]
        for prompt, length in zip(prompts(4, checkpoint.vocab_size), (1, 16, 33, 50), strict=True)
    ]


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -0.5])
def test_answers_equal_transformers(checkpoint, ending, end_tokens, width, early_stopping, length_penalty):
    params = BeamSearchParams(width, MAX_TOKENS, length_penalty=length_penalty, early_stopping=early_stopping)
    outputs = ending.beam_search(asked(checkpoint), params)
    num_stopped = 0
    for prompt, output in zip(asked(checkpoint), outputs, strict=True):
        expected = hf_beams(
            checkpoint.reference,
            prompt,
            width,
            MAX_TOKENS,
            [EOS, *end_tokens],
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )
        assert output.prompt_token_ids == prompt
        num_stopped += check_beams(output, expected, length_penalty)
    # Where length counts much, the longest answers win.
    assert num_stopped > 0 or length_penalty == 2.0, "no answer ends early, so nothing is compared"
    assert_at_rest(ending)


def test_answers_that_ignore_end_tokens_equal_transformers(checkpoint, ending):
    params = BeamSearchParams(4, MAX_TOKENS, ignore_eos=True)
    for prompt, output in zip(asked(checkpoint), ending.beam_search(asked(checkpoint), params), strict=True):
        assert check_beams(output, hf_beams(checkpoint.reference, prompt, 4, MAX_TOKENS, []), 1.0) == 0


def test_an_answer_holds_the_prompt_and_its_text(llm):
    (output,) = llm.beam_search("the cat sat", BeamSearchParams(beam_width=3, max_tokens=6))
    prompt = llm.tokenizer.encode("the cat sat")
    scores = [one.score for one in output.sequences]
    assert len(scores) == 3
    assert all(before >= after for before, after in pairwise(scores))
    for one in output.sequences:
        assert one.tokens[: len(prompt)] == prompt
        assert one.text == llm.tokenizer.decode(one.tokens, skip_special_tokens=False)
        assert one.finish_reason == "length"


def test_temperature_0_and_1_change_nothing(llm):
    outputs = [
        llm.beam_search([[5, 6, 7]], BeamSearchParams(3, 8, temperature=temperature))
        for temperature in (0, 1)
    ]
    assert outputs[0][0].sequences == outputs[1][0].sequences


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beam_width": 0}, "beam_width is 0, allowed: an integer in 1..128"),
        ({"beam_width": 129}, "beam_width is 129"),
        ({"temperature": 0.7}, "temperature is 0.7, allowed: 0 or 1"),
        ({"temperature": True}, "temperature is True"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"length_penalty": 6}, "length_penalty is 6, allowed: a number in -5..5"),
        ({"early_stopping": "always"}, "early_stopping is 'always', allowed: true, false or \"never\""),
        ({"early_stopping": 1}, "early_stopping is 1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"ignore_eos": 1}, "ignore_eos is 1"),
    ],
)
def test_what_is_not_allowed_is_named(changes, message):
    with pytest.raises(InvalidRequest) as refusal:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **changes})
    assert message in str(refusal.value)


def test_a_search_that_cannot_be_served_is_refused_and_nothing_runs(ending, llm):
    # 402 tokens, of which four end an answer: 80 beams need 400 candidates.
    with pytest.raises(InvalidRequest, match=r"beam_width is 81, allowed: 1\.\.80 with this vocabulary"):
        ending.beam_search([[5]], BeamSearchParams(81, 4))
    with pytest.raises(InvalidRequest, match=r"need up to \d+ blocks of 16, the cache has 400"):
        llm.beam_search([[5] * 10], BeamSearchParams(64, 400))
    with pytest.raises(InvalidRequest, match="maximum context length is 512"):
        llm.beam_search([[5] * 10], BeamSearchParams(2, 600))
    with pytest.raises(TypeError, match="SamplingParams"):
        llm.beam_search([[5] * 10], SamplingParams())


def test_a_width_that_the_steps_do_not_hold_is_refused(checkpoint):
    llm = LLM(**checkpoint.options, max_num_seqs=4)
    with pytest.raises(InvalidRequest, match="beam_width is 5, allowed: 1 to 4"):
        llm.beam_search([[5]], BeamSearchParams(5, 4))
    assert len(llm.beam_search([[5]], BeamSearchParams(4, 4))[0].sequences) == 4
    assert_at_rest(llm)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preemption_changes_no_answer(checkpoint, enable_prefix_caching):
    sizes = {"max_model_len": 128, "block_size": 4, "enable_prefix_caching": enable_prefix_caching}
    roomy = LLM(**checkpoint.options | sizes)
    tight = LLM(**checkpoint.options | sizes | {"num_blocks": 60})
    # More tokens than admission leaves room for.
    params = BeamSearchParams(2, 110, ignore_eos=True)
    many = [prompt[:5] for prompt in prompts(5, checkpoint.vocab_size, seed=9)]
    alone = [roomy.beam_search([prompt], params)[0] for prompt in many]
    together = tight.beam_search(many, params)
    assert tight.stats()["preemptions"] > 0
    for one, other in zip(alone, together, strict=True):
        assert [answer.tokens for answer in one.sequences] == [answer.tokens for answer in other.sequences]
    assert_at_rest(tight)


def test_the_prompt_is_computed_once_and_only_tails_are_copied(checkpoint):
    llm = LLM(**checkpoint.options)
    prompt = prompts(1, checkpoint.vocab_size)[0][:50]
    prompt += [7] * (50 - len(prompt))
    llm.beam_search([prompt], BeamSearchParams(8, 20, ignore_eos=True))
    stats = llm.stats()
    # 50 + 8 * 19 tokens in 20 steps; a step copies the tails of all beams but one at most.
    assert (stats["prompt_tokens"], stats["scheduled_tokens"], stats["steps"]) == (50, 50 + 8 * 19, 20)
    assert stats["copies"] <= 7 * 19
    assert_at_rest(llm)


async def test_a_search_beside_other_requests(checkpoint, shared_llm):
    params = BeamSearchParams(4, 12)
    expected = [shared_llm.beam_search([prompt], params)[0] for prompt in asked(checkpoint)]
    async with AsyncLLM(**checkpoint.options | {"num_blocks": 1000, "max_model_len": 8000}) as llm:

        async def sample() -> None:
            async for _ in llm.generate([5, 6, 7], LONG):
                pass

        other = asyncio.create_task(sample())
        outputs = await asyncio.gather(*(llm.beam_search(prompt, params) for prompt in asked(checkpoint)))
        for output, one in zip(outputs, expected, strict=True):
            assert [answer.tokens for answer in output.sequences] == [
                answer.tokens for answer in one.sequences
            ]
        search = asyncio.create_task(llm.beam_search([5, 6], BeamSearchParams(4, 2000, ignore_eos=True)))
        await asyncio.sleep(0.2)
        assert llm.num_in_flight == 2
        for task in (search, other):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await at_rest(llm)


def test_candidates_are_ranked_with_the_lowest_id_first_on_ties():
    logits = torch.zeros(3, 50)
    logits[0, [40, 3, 17]] = torch.tensor([2.0, 1.0, 1.0])
    logits[2] = torch.arange(50.0)
    ids, logprobs = likeliest(logits, 4)
    assert ids.tolist() == [[40, 3, 17, 0], [0, 1, 2, 3], [49, 48, 47, 46]]
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).gather(1, ids))
    logits[1, 4] = float("nan")
    again, logprobs = likeliest(logits, 4)
    assert logprobs.isnan().any(1).tolist() == [False, True, False]
    assert again[[0, 2]].equal(ids[[0, 2]])
