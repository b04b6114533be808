"""Request bodies: what is accepted, what is refused and how the refusal reads. No engine is needed."""

import json
from typing import Any

import pytest

from pagedkv.serve.errors import ApiError
from pagedkv.serve.protocol import ChatRequest, CompletionRequest, parse_json, parse_request

USER = {"role": "user", "content": "hi"}
OPTIONAL = [
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "cache_salt",
    "echo",
    "suffix",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "tools",
    "tool_choice",
    "response_format",
    "functions",
    "function_call",
    "guided_grammar",
    "structured_outputs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "min_tokens",
    "user",
    "foo",
]


def completion(strict: bool = False, **fields: Any) -> tuple[CompletionRequest, list[str]]:
    body = json.dumps({"prompt": "x", **fields}).encode()
    return parse_request(CompletionRequest, body, strict=strict)


def chat(strict: bool = False, **fields: Any) -> tuple[ChatRequest, list[str]]:
    return parse_request(ChatRequest, json.dumps({"messages": [USER], **fields}).encode(), strict=strict)


def refused(call: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(**fields)
    assert caught.value.status == 400
    assert caught.value.type == "invalid_request_error"
    return caught.value


def test_null_is_absent_in_every_field() -> None:
    assert completion(**dict.fromkeys(OPTIONAL)) == completion()
    names = [
        *OPTIONAL,
        "top_logprobs",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template_kwargs",
        "enable_thinking",
        "reasoning_effort",
    ]
    assert chat(**dict.fromkeys(names)) == chat()


def test_null_is_absent_inside_messages_and_options() -> None:
    sent_back = {"role": "assistant", "content": None, "refusal": None, "audio": None, "tool_calls": None}
    request, _ = chat(messages=[USER, sent_back, {**USER, "name": None}])
    assert request.messages[1].as_template_input() == {"role": "assistant", "content": ""}
    request, _ = chat(stream=True, stream_options={"include_usage": None, "continuous_usage_stats": True})
    assert request.stream_options is not None
    assert not request.stream_options.include_usage


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", -0.1),
        ("temperature", 100.5),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_p", "0.9"),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -1),
        ("min_p", 2),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("n", 2.0),
        ("seed", -2),
        ("seed", 2**64),
        ("seed", "1"),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "16"),
        ("max_completion_tokens", 0),
        ("max_tokens", 2**40),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop", ["a"] * 65),
        ("stop", "a" * 1025),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", 1),
        ("stop_token_ids", [1] * 257),
        ("ignore_eos", 1),
        ("stream", "true"),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("model", 5),
        ("cache_salt", ""),
        ("cache_salt", 5),
        ("prompt", []),
        ("prompt", [[1], "a"]),
        ("prompt", [True, 1]),
        ("prompt", [1.5]),
        ("prompt", {"a": 1}),
        ("prompt", ["a", 5]),
        ("prompt", ["a", [1]]),
    ],
)
def test_wrong_value_names_field_and_value(field: str, value: Any) -> None:
    error = refused(completion, **{field: value})
    assert error.param is not None
    assert error.param.startswith(field)
    assert error.message.startswith(field)
    assert "must" in error.message
    assert "got " in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logprobs", 1),
        ("top_logprobs", 21),
        ("messages", []),
        ("messages", "hi"),
        ("messages", [{"role": "robot", "content": "x"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": 5}]}]),
        ("messages", [{"role": "assistant", "tool_calls": [{"function": {}}]}]),
        ("continue_final_message", True),
        ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", []),
        ("stream_options", {"include_usage": "yes"}),
        ("stream_options", {"include_usage": True}),
    ],
)
def test_wrong_chat_value_names_its_place(field: str, value: Any) -> None:
    error = refused(chat, **{field: value})
    assert error.param is not None
    assert error.param.startswith(field)


def test_place_inside_messages_is_spelled_out() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}
    error = refused(chat, messages=[USER, message])
    assert error.param == "messages[1].content[1].type"
    assert '"input_audio"' in error.message


@pytest.mark.parametrize(
    ("field", "neutral", "real"),
    [
        ("frequency_penalty", 0, 0.1),
        ("frequency_penalty", 0.0, False),
        ("presence_penalty", 0, "0"),
        ("repetition_penalty", 1.0, 1.1),
        ("logit_bias", {}, {"5": 1}),
        ("tools", [], [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "auto", "required"),
        ("tool_choice", "none", {"type": "function", "function": {"name": "f"}}),
        ("echo", False, True),
        ("suffix", "", "end"),
        ("response_format", {"type": "text"}, {"type": "json_object"}),
        ("min_tokens", 0, 1),
        ("prompt_logprobs", None, 0),
        ("truncate_prompt_tokens", None, -1),
        ("functions", [], [{"name": "f"}]),
        ("guided_json", None, {}),
        ("structured_outputs", None, {"grammar": "x"}),
        ("length_penalty", 1, 0.5),
        ("early_stopping", False, True),
        ("early_stopping", False, "never"),
        ("return_token_ids", False, True),
    ],
)
def test_unsupported_field_is_refused_unless_neutral(field: str, neutral: Any, real: Any) -> None:
    _, ignored = completion(**{field: neutral})
    assert ignored == []
    for call in (completion, chat):
        error = refused(call, **{field: real})
        assert error.param == field
        assert field in error.message
        assert error.code == "unsupported_parameter"


def test_best_of_is_at_least_n() -> None:
    assert completion(n=2, best_of=2)[0].best_of == 2
    assert completion(n=2, best_of=5)[0].best_of == 5
    error = refused(completion, n=3, best_of=2)
    assert (error.param, error.message) == ("best_of", "best_of must be at least n (3), got 2.")
    assert refused(completion, best_of=129).param == "best_of"
    assert refused(completion, prompt=["a"] * 10, best_of=128).param == "prompt"


@pytest.mark.parametrize(
    ("field", "neutral", "real"),
    [
        ("temperature", 0, 0.5),
        ("best_of", 2, 3),
        ("top_p", 1.0, 0.9),
        ("top_k", -1, 5),
        ("min_p", 0, 0.1),
        ("stop", [], "x"),
        ("stop_token_ids", [], [3]),
        ("length_penalty", 2.0, 6.0),
        ("length_penalty", -0.5, "1"),
        ("early_stopping", "never", "always"),
        ("early_stopping", True, 1),
        ("use_beam_search", True, 1),
    ],
)
def test_a_beam_search_takes_its_own_fields_only(field: str, neutral: Any, real: Any) -> None:
    for call in (completion, chat):
        body, ignored = call(**{"use_beam_search": True, "n": 2, field: neutral})
        assert (ignored, body.use_beam_search) == ([], True)
        error = refused(call, **{"use_beam_search": True, "n": 2, field: real})
        assert error.param == field
        assert field in error.message
    assert refused(completion, use_beam_search=True, logprobs=0).param == "logprobs"
    assert refused(chat, use_beam_search=True, logprobs=True).param == "logprobs"


def test_what_a_template_sees_besides_the_conversation() -> None:
    assert chat()[0].template_variables == {}
    request, ignored = chat(strict=True, enable_thinking=False, reasoning_effort="low")
    assert ignored == []
    assert request.template_variables == {"enable_thinking": False, "reasoning_effort": "low"}
    request, _ = chat(enable_thinking=False, chat_template_kwargs={"enable_thinking": True, "date": "today"})
    assert request.template_variables == {"enable_thinking": True, "date": "today"}
    assert refused(chat, enable_thinking="no").param == "enable_thinking"
    # Without a conversation there is no template, so they can change nothing.
    assert completion(strict=True, enable_thinking=False, reasoning_effort="low")[1] == []


def test_unknown_fields_are_ignored_and_named() -> None:
    _, ignored = completion(foo=1, bar={}, user="u", metadata={}, store=True, guided_json=None)
    assert ignored == ["bar", "foo"]
    assert completion(strict=True, user="u", metadata={})[1] == []
    error = refused(completion, strict=True, foo=1)
    assert error.param == "foo"


def test_unknown_keys_inside_messages_are_ignored() -> None:
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part], "metadata": {}, "id": 5, "annotations": []}
    request, ignored = chat(strict=True, messages=[message])
    assert ignored == []
    assert request.messages[0].as_template_input() == {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("", [""]),
    ],
)
def test_prompt_forms(sent: Any, seen: Any) -> None:
    assert completion(prompt=sent)[0].prompt == seen


def test_number_of_sequences_is_bounded() -> None:
    assert completion(prompt=["a"] * 8, n=128)[0].n == 128
    assert refused(completion, prompt=["a"] * 9, n=128).param == "prompt"


def test_a_seed_may_be_left_to_the_engine_as_vllm_spells_it() -> None:
    assert completion(seed=-1)[0].seed == -1
    assert chat(seed=-1)[0].seed == -1


def test_newer_token_limit_wins() -> None:
    request, _ = completion(max_tokens=5, max_completion_tokens=9)
    assert (request.token_limit, request.token_limit_field) == (9, "max_completion_tokens")
    assert completion(max_tokens=5)[0].token_limit == 5
    assert completion()[0].token_limit is None


def test_logprobs_forms() -> None:
    assert completion(logprobs=0)[0].num_logprobs == 0
    assert completion()[0].num_logprobs is None
    assert chat(logprobs=True)[0].num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=5)[0].num_logprobs == 5
    assert chat(logprobs=False, top_logprobs=0)[0].num_logprobs is None
    assert refused(chat, top_logprobs=2).param == "top_logprobs"


def test_stop_forms() -> None:
    assert completion(stop="a")[0].stop == ["a"]
    assert completion(stop=[])[0].stop == []
    assert len(completion(stop=[f"s{i}" for i in range(64)])[0].stop) == 64


def test_conversation_as_templates_see_it() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    request, _ = chat(
        messages=[
            {"role": "developer", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b"], "name": "bob"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": [{"type": "text", "text": "r"}], "tool_call_id": "c1"},
        ]
    )
    turns = [message.as_template_input() for message in request.messages]
    assert turns[0] == {"role": "system", "content": "s"}
    assert turns[1] == {"role": "user", "content": "a\nb", "name": "bob"}
    assert turns[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert turns[3] == {"role": "tool", "content": "r", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'"x"',
        b"null",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"\\udfff": 1}',
        b"[" * 90_000,
        b'{"a": ' + b"1" * 5000 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(raw)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("raw", [b'{"a": [1, -2, 3.5, {"b": null}], "c": {}}', b"[1]", b"{", b'{"a": NaN}'])
def test_yielding_to_other_threads_changes_nothing(raw: bytes) -> None:
    def parsed(yielding: bool) -> Any:
        try:
            return parse_json(raw, yielding=yielding)
        except ApiError as error:
            return error.message

    assert parsed(True) == parsed(False)


def test_whole_surrogate_pairs_are_text() -> None:
    assert parse_json(b'{"a": "\\ud83e\\uddea"}') == {"a": "\U0001f9ea"}


def test_infinite_number_is_refused() -> None:
    raw = b'{"prompt": "x", "temperature": 1e999}'
    with pytest.raises(ApiError, match="temperature must be a finite number"):
        parse_request(CompletionRequest, raw, strict=False)
