"""Several answers to a prompt, and seeds: what repeats, what differs, and what depends on the batch."""

import pytest

from pagedkv import LLM, SamplingParams
from pagedkv.front import Seeds
from tiny_llm import GREEDY, NUM_TOKENS, assert_at_rest, sampled, texts


def test_n_greedy_answers_are_the_same_and_prefill_once(llm, expected):
    llm.reset_prefix_cache()  # Another test may have asked the same.
    before = llm.stats()["prompt_tokens"]
    one = max(expected, key=lambda one: len(one.prompt))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, n=5)
    (output,) = llm.generate(one.prompt, params, use_tqdm=False)
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3, 4]
    for answer in output.outputs:
        one.check(answer)
    assert llm.stats()["prompt_tokens"] - before == len(one.prompt)


def test_n_sampled_answers_differ_and_their_seed_repeats_them(llm):
    first, again, other = llm.generate(
        ["the cat"] * 3, [sampled(seed=7, n=4), sampled(seed=7, n=4), sampled(seed=8, n=4)], use_tqdm=False
    )
    answers = texts([first])[0]
    assert len({tuple(answer) for answer in answers}) == 4
    assert texts([again])[0] == answers
    assert texts([other])[0] != answers


def test_more_answers_than_sequences_may_run(checkpoint):
    few, many = LLM(**checkpoint.options, max_num_seqs=2), LLM(**checkpoint.options)
    params = sampled(seed=5, n=6)
    assert texts(few.generate("dog", params, use_tqdm=False)) == texts(
        many.generate("dog", params, use_tqdm=False)
    )
    assert_at_rest(few)


def test_a_batch_of_mixed_seeds_equals_single_runs(llm):
    asked = [sampled(seed=seed) for seed in (0, 1, 2**63, 2**64 - 1)] + [GREEDY]
    together = llm.generate(["the mat"] * len(asked), asked, use_tqdm=False)
    alone = [llm.generate("the mat", params, use_tqdm=False)[0] for params in asked]
    assert texts(together) == texts(alone)
    assert len({tuple(answers[0]) for answers in texts(together)}) == len(asked)


def test_seeds_that_are_not_given_follow_from_the_engines(checkpoint):
    runs = []
    for seed in (3, 3, 4):
        llm = LLM(**checkpoint.options, seed=seed)
        runs.append(texts(llm.generate(["the mat"] * 3, sampled(), use_tqdm=False)))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert runs[0][0] != runs[0][1]


@pytest.mark.parametrize("changes", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_filters_that_leave_one_token_are_greedy(llm, expected, changes):
    params = SamplingParams(temperature=1.5, max_tokens=NUM_TOKENS, ignore_eos=True, **changes)
    for output, one in zip(
        llm.generate([one.prompt for one in expected[:4]], params, use_tqdm=False), expected, strict=False
    ):
        one.check(output.outputs[0])


def test_seeds_are_splitmix64():
    # The generator's published first outputs from 1234567.
    seeds = Seeds(1234567)
    assert [seeds.draw() for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
