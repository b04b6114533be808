"""`LLM` on a tiny model: greedy answers of transformers whatever the cache does, chat, progress, times."""

import pytest

from pagedkv import LLM, InvalidRequest
from pagedkv.text import ChatTemplateError
from tiny_llm import GREEDY, check_all, prompts, sampled, texts


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
    assert llm.reset_prefix_cache().blocks > 0
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


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


def test_content_that_is_none_is_an_empty_text(llm):
    turn = {"role": "user", "content": "the cat"}
    (expected,) = llm.chat([turn, {"role": "assistant", "content": ""}, turn], GREEDY, use_tqdm=False)
    for silent in ({"role": "assistant", "content": None}, {"role": "assistant"}):
        (output,) = llm.chat([turn, silent, turn], GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == expected.prompt_token_ids
    assert llm.chat([], GREEDY, use_tqdm=False) == []


def test_content_in_parts_is_their_text(llm):
    (expected,) = llm.chat([{"role": "user", "content": "the cat\nthe dog"}], GREEDY, use_tqdm=False)
    parts = [{"type": "text", "text": "the cat"}, "the dog"]
    (output,) = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    assert output.prompt_token_ids == expected.prompt_token_ids
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(ChatTemplateError, match="the chat template failed on these messages"):
        llm.chat([{"role": "user", "content": [*parts, image]}], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ({"role": "user", "content": "x"}, {}, "messages is a dict, allowed: a list of messages such as "),
        ("x", {}, "messages is a str, allowed: a list of messages"),
        (None, {}, "messages is a NoneType, allowed: a list of messages"),
        ([], {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs has the name 'tools', allowed: "),
        ([], {"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs has the name 'self', allowed: "),
        ([], {"chat_template_kwargs": {1: 1}}, "chat_template_kwargs is {1: 1}, allowed: a mapping of names"),
        ([], {"chat_template_kwargs": "x"}, "chat_template_kwargs is 'x', allowed: a mapping of names"),
    ],
)
def test_what_is_no_conversation_is_refused(llm, messages, options, message):
    with pytest.raises(InvalidRequest) as refusal:
        llm.chat(messages, GREEDY, use_tqdm=False, **options)
    assert str(refusal.value).startswith(message)


def test_what_is_no_message_is_refused(llm):
    turn = {"role": "user", "content": "x"}
    for messages in ([turn, "y"], [[turn], [turn, 5]]):
        with pytest.raises(ChatTemplateError, match=r"messages\[1\]: expected an object"):
            llm.chat(messages, GREEDY, use_tqdm=False)


def test_an_unknown_option_is_a_type_error(checkpoint):
    with pytest.raises(TypeError, match="tensor_parallel_size"):
        LLM(**checkpoint.options, tensor_parallel_size=4)


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
