"""`LLM` on tiny models: the answers of transformers whatever the cache does, and all that ends an answer."""

import logging
from functools import partial

import pytest
import torch

from pagedkv import LLM, InvalidRequest, RequestFailed, SamplingParams, loading
from pagedkv.front import Seeds
from tiny_llm import Checkpoint, Greedy, make_checkpoint, prompts

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(checkpoint) -> list[Greedy]:
    return [checkpoint.greedy(prompt, NUM_TOKENS) for prompt in prompts(10, checkpoint.vocab_size)]


@pytest.fixture(scope="module")
def llm(checkpoint) -> LLM:
    return LLM(**checkpoint.options, seed=11)


@pytest.fixture(autouse=True)
def _nothing_is_left(request):
    yield
    if "llm" in request.fixturenames:
        assert_at_rest(request.getfixturevalue("llm"))


def assert_at_rest(llm: LLM) -> None:
    llm.check_invariants()
    snapshot = llm.snapshot()
    assert (snapshot["owned"], snapshot["fenced"], snapshot["sequences"]) == (0, 0, [])


def check_all(llm: LLM, expected: list[Greedy]) -> None:
    outputs = llm.generate([one.prompt for one in expected], GREEDY, use_tqdm=False)
    for output, one in zip(outputs, expected, strict=True):
        assert output.finished
        assert output.prompt_token_ids == one.prompt
        assert output.outputs[0].finish_reason == "length"
        one.check(output.outputs[0])
    assert_at_rest(llm)


# Greedy answers equal those of transformers.


@pytest.mark.parametrize("max_num_batched_tokens", [7, 512])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("block_size", [4, 16, 64])
def test_greedy_answers_do_not_depend_on_the_cache(
    checkpoint, expected, block_size, enable_prefix_caching, max_num_batched_tokens
):
    llm = LLM(
        **checkpoint.options,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    check_all(llm, expected)
    # The second time, whole prompts are found again.
    check_all(llm, expected)
    assert (llm.stats()["prefix_hits"] > 0) is enable_prefix_caching


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("max_num_batched_tokens", [7, 512])
def test_greedy_answers_do_not_depend_on_preemption(
    checkpoint, expected, monkeypatch, max_num_batched_tokens, enable_prefix_caching
):
    # A slot that is read before it is written would show as NaN.
    monkeypatch.setenv("PAGEDKV_POISON", "1")
    options = checkpoint.options | {"num_blocks": 36, "max_model_len": None}
    llm = LLM(
        **options,
        block_size=4,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )
    check_all(llm, expected)
    assert llm.stats()["preemptions"] > 0


def test_one_sequence_at_a_time(checkpoint, expected):
    check_all(LLM(**checkpoint.options, max_num_seqs=1), expected)


def test_a_repeated_prompt_says_how_much_was_found(llm, checkpoint):
    prompt = prompts(1, checkpoint.vocab_size, seed=77)[0] * 2
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    # All but the last token, whose logits have to be computed.
    assert second.num_cached_tokens == (len(prompt) - 1 if len(prompt) % 16 == 0 else len(prompt) // 16 * 16)
    assert second.num_cached_tokens > 0
    assert llm.reset_prefix_cache() > 0
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


# Several answers, seeds.


def test_n_greedy_answers_are_the_same_and_prefill_once(llm, expected):
    before = llm.stats()["prompt_tokens"]
    one = max(expected, key=lambda one: len(one.prompt))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, n=5)
    (output,) = llm.generate(one.prompt, params, use_tqdm=False)
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3, 4]
    for answer in output.outputs:
        one.check(answer)
    assert llm.stats()["prompt_tokens"] - before == len(one.prompt)


def texts(outputs) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def sampled(seed=None, n=1, **changes) -> SamplingParams:
    return SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, seed=seed, n=n, **changes)


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


# Ends of answers.


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


# Log-probabilities.


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


# Prompts.


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


def test_chat_goes_through_the_template(llm):
    messages = [{"role": "user", "content": "the dog"}]
    ids = llm.tokenizer.encode(
        "<|start|>user\nthe dog<|end|>\n<|start|>assistant\n", add_special_tokens=False
    )
    (expected,) = llm.generate([ids], GREEDY, use_tqdm=False)
    (single,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert single.prompt_token_ids == ids
    assert texts([single]) == texts([expected])
    both = llm.chat([messages, messages], [GREEDY, sampled(seed=1)], use_tqdm=False)
    assert texts(both)[0] == texts([expected])[0]
    (bare,) = llm.chat(messages, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert bare.prompt_token_ids == ids[: len(bare.prompt_token_ids)] != ids


def test_an_unknown_option_is_a_type_error(checkpoint):
    with pytest.raises(TypeError, match="gpu_memory_utilization"):
        LLM(**checkpoint.options, gpu_memory_utilization=0.9)


# The pool, the queue, failures.


def test_the_longest_length_is_capped_to_what_the_pool_holds(checkpoint, caplog):
    options = checkpoint.options | {"num_blocks": 10, "max_model_len": None}
    with caplog.at_level(logging.INFO, logger="pagedkv"):
        llm = LLM(**options)
    assert llm.max_model_len == 160
    assert (
        "max_model_len is 160 of the 8192 tokens that the model was trained for: "
        "the pool holds 10 blocks of 16 tokens"
    ) in caplog.messages
    assert any(
        message.startswith("the cache holds 160 tokens in 10 blocks of 16") for message in caplog.messages
    )
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate([[5] * 30], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 130
    with pytest.raises(InvalidRequest, match="maximum context length is 160 tokens"):
        llm.generate([[5] * 170], params, use_tqdm=False)
    assert_at_rest(llm)
    with pytest.raises(
        ValueError, match=r"^max_model_len is 161, allowed: 1\.\.160, because the pool holds 10"
    ):
        LLM(**options | {"max_model_len": 161})


def test_kv_memory_sizes_the_pool(checkpoint):
    # 2 layers x 2 heads x 16 elements x key and value x 4 bytes are 512 bytes a token, 8 KiB a block.
    options = checkpoint.options | {"num_blocks": None, "max_model_len": None}
    llm = LLM(**options, kv_memory="1MiB")
    assert llm.snapshot()["num_blocks"] == 127
    assert llm.max_model_len == 127 * 16


def test_a_full_queue_is_waited_for(checkpoint, expected, monkeypatch):
    monkeypatch.setattr(loading._core, "Core", partial(loading._core.Core, max_queued_requests=2))
    check_all(LLM(**checkpoint.options), expected)


def test_a_step_that_raises_ends_its_requests_only(checkpoint, expected, monkeypatch):
    llm = LLM(**checkpoint.options)
    forward, calls = llm._engine.runner.run, []

    def broken(header, arena):
        calls.append(header.step_id)
        if len(calls) == 3:
            raise ArithmeticError("a bad step")
        return forward(header, arena)

    monkeypatch.setattr(llm._engine.runner, "run", broken)
    with pytest.raises(RequestFailed, match="ArithmeticError: a bad step") as failure:
        llm.generate([one.prompt for one in expected], GREEDY, use_tqdm=False)
    assert isinstance(failure.value.__cause__, ArithmeticError)
    assert_at_rest(llm)
    check_all(llm, expected)


def test_an_interrupt_ends_what_runs_and_leaves_the_engine_usable(checkpoint, expected, monkeypatch):
    llm = LLM(**checkpoint.options)
    with monkeypatch.context() as patch:
        forward, calls = llm._engine.runner.run, []

        def interrupted(header, arena):
            calls.append(header.step_id)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return forward(header, arena)

        patch.setattr(llm._engine.runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([one.prompt for one in expected], GREEDY, use_tqdm=False)
    assert_at_rest(llm)
    check_all(llm, expected)


def test_an_interrupt_before_the_forward_pass_leaves_the_engine_usable(checkpoint, expected, monkeypatch):
    llm = LLM(**checkpoint.options)

    class Interrupted:
        """A core that is interrupted between deciding a step and computing it."""

        def __init__(self, core):
            self.core, self.calls = core, 0

        def __getattr__(self, name):
            return getattr(self.core, name)

        def schedule(self, arena):
            self.calls += 1
            header = self.core.schedule(arena)
            if self.calls == 4:
                raise KeyboardInterrupt
            return header

    monkeypatch.setattr(llm._engine, "core", Interrupted(llm._engine.core))
    with pytest.raises(KeyboardInterrupt):
        llm.generate([one.prompt for one in expected], GREEDY, use_tqdm=False)
    assert_at_rest(llm)
    check_all(llm, expected)


def test_an_interrupt_between_steps_leaves_the_engine_usable(checkpoint, expected, monkeypatch):
    llm = LLM(**checkpoint.options)
    with monkeypatch.context() as patch:

        def interrupted(events):
            raise KeyboardInterrupt

        patch.setattr(llm._front.streams, "apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([one.prompt for one in expected], GREEDY, use_tqdm=False)
    assert_at_rest(llm)
    check_all(llm, expected)


def test_progress_is_shown_only_when_asked(llm, capsys):
    llm.generate("the", GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    llm.generate(["the", "cat"], GREEDY)
    assert "2/2" in capsys.readouterr().err


def test_times_are_in_order(llm):
    metrics = llm.generate("the", GREEDY, use_tqdm=False)[0].metrics
    assert (
        0
        < metrics.arrival_time
        <= metrics.first_scheduled_time
        <= metrics.first_token_time
        <= metrics.finished_time
    )


def test_seeds_are_splitmix64():
    # The generator's published first outputs from 1234567.
    seeds = Seeds(1234567)
    assert [seeds.draw() for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
