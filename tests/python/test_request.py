"""Requests before they are submitted: what a refusal says about its field, and how long an answer may be."""

from typing import Any, cast

import numpy as np
import pytest

from fake_engine import VOCAB_SIZE, FakeTokenizer
from pagedkv import EngineConfig, InvalidRequest, PagedKVError, SamplingParams, _core
from pagedkv.front import Front
from pagedkv.models import ModelConfig
from pagedkv.request import ContextOverflow, Limits, Prompt, Request, make_request, params_for, split_prompts
from pagedkv.text import Tokenizer

TOKENIZER = cast(Tokenizer, FakeTokenizer())


def prepare(prompt: Any, max_tokens: int | None = None, **options: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=options.pop("stop_token_ids", None))
    return make_request(prompt, params, TOKENIZER, Limits(32, VOCAB_SIZE), **options)


@pytest.mark.parametrize(
    "prompt",
    [
        [3, VOCAB_SIZE - 1],
        (3, VOCAB_SIZE - 1),
        np.array([3, VOCAB_SIZE - 1], dtype=np.uint16),
        [np.int64(3), VOCAB_SIZE - 1],
        {"prompt_token_ids": np.array([3, VOCAB_SIZE - 1])},
    ],
)
def test_token_ids_in_any_form(prompt: Prompt) -> None:
    request = prepare(prompt)
    assert request.prompt_token_ids == [3, VOCAB_SIZE - 1]
    assert {type(token_id) for token_id in request.prompt_token_ids} == {int}
    assert request.tokens.dtype == np.int32
    assert request.tokens.tolist() == request.prompt_token_ids


@pytest.mark.parametrize(
    ("prompt", "options", "field", "message"),
    [
        ([], {}, "prompt", "prompt is empty, allowed: at least one token"),
        ([1, VOCAB_SIZE], {}, "prompt", "prompt has the token id 5000, allowed: 0..4999"),
        ([1, 2**80], {}, "prompt", f"prompt has the token id {2**80}, allowed: 0..4999"),
        ([-(2**70)], {}, "prompt", f"prompt has the token id {-(2**70)}, allowed: 0..4999"),
        ([1, np.bool_(True)], {}, "prompt", "prompt has a bool at place 1, allowed: token ids"),
        ([1.0], {}, "prompt", "prompt has a float at place 0, allowed: token ids"),
        (np.array([[1]]), {}, "prompt", "prompt is a ndarray, allowed: a text"),
        ("x", {"stop_token_ids": [1, 5000]}, "stop_token_ids", "stop_token_ids has the token id 5000"),
        ("x" * 32, {}, "prompt", "This model's maximum context length is 32 tokens, but the prompt has 32"),
        (
            "x" * 30,
            {"max_tokens": 3},
            "max_tokens",
            "This model's maximum context length is 32 tokens, but 33",
        ),
        ("x", {"salt": bytearray(b"s3cret")}, "salt", "salt is a bytearray, allowed: bytes"),
        ("x", {"salt": "s3cret"}, "salt", "salt is a str, allowed: bytes"),
        # How long it is decides before anything looks at the tokens.
        ([-1] * 32, {}, "prompt", "This model's maximum context length is 32 tokens"),
    ],
)
def test_a_refusal_names_its_field(prompt: Any, options: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        prepare(prompt, **options)
    assert refusal.value.field == field
    assert str(refusal.value).startswith(message)
    assert isinstance(refusal.value, ContextOverflow) == message.startswith("This model's")


def test_refusals_of_lists_and_parameters_name_their_field() -> None:
    for field, refused in (
        ("prompts", lambda: split_prompts(cast(Any, 5))),
        ("sampling_params", lambda: params_for(cast(Any, {}), 1)),
        ("sampling_params", lambda: params_for([SamplingParams()] * 3, 2)),
        ("top_p", lambda: SamplingParams(top_p=0)),
        ("stop", lambda: SamplingParams(stop="")),
    ):
        with pytest.raises(InvalidRequest) as refusal:
            refused()
        assert refusal.value.field == field
    assert issubclass(InvalidRequest, PagedKVError)


def test_how_long_an_answer_may_be() -> None:
    assert prepare("x" * 20).max_tokens == 12
    assert prepare("x" * 20, 7).max_tokens == 7
    assert prepare("x" * 20, default_max_tokens=10).max_tokens == 10
    assert prepare("x" * 20, 11, default_max_tokens=10).max_tokens == 11
    assert prepare("x" * 28, default_max_tokens=10).max_tokens == 4


def test_a_long_text_that_cannot_fit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "encode", None)
    with pytest.raises(
        ContextOverflow, match="32 tokens, but the prompt has at least 5000, which"
    ) as refusal:
        prepare("x" * 5000)
    assert refusal.value.field == "prompt"


def core_and_front() -> tuple[_core.Core, Front]:
    core = _core.Core(num_blocks=4, block_size=4, max_num_seqs=1, max_num_batched_tokens=8, max_model_len=8)
    limits = Limits(32, VOCAB_SIZE)
    return core, Front(core.edge, TOKENIZER, EngineConfig(), cast(ModelConfig, None), limits, 1)


def test_what_the_core_refuses_is_an_invalid_request() -> None:
    _, front = core_and_front()
    with pytest.raises(InvalidRequest, match="maximum context length is 8 tokens"):
        front.submit(front.request("x" * 9, SamplingParams()))
    assert len(front.streams) == 0


@pytest.mark.parametrize("request_id", [5, ["a"], b"a"])
def test_a_request_under_an_impossible_name_does_not_reach_the_core(request_id: Any) -> None:
    core, front = core_and_front()
    with pytest.raises(InvalidRequest, match=r"^request_id is .*, allowed: a text, or None") as refusal:
        front.submit(front.request("x", SamplingParams(max_tokens=4)), request_id)
    assert refusal.value.field == "request_id"
    assert core.schedule(np.zeros(core.arena_len, np.int32)) is None
