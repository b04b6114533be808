"""Sampling parameters: defaults, refusals with field, value and what is allowed."""

import math

import pytest

from pagedkv import InvalidRequest, SamplingParams


def test_the_defaults():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.seed, params.max_tokens, params.logprobs) == (None, 16, None)
    assert (params.stop, params.stop_strings, params.stop_ids) == ((), None, ())
    assert (params.ignore_eos, params.detokenize, params.skip_special_tokens) == (False, True, True)
    assert not params.include_stop_str_in_output


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [1, 128]),
        ("temperature", [0, 0.0, 1e-6, 1, 100]),
        ("top_p", [1e-9, 0.5, 1, 1.0]),
        ("top_k", [-1, 0, 1, 2**31 - 1]),
        ("min_p", [0, 0.5, 1.0]),
        ("seed", [None, -1, 0, 2**63, 2**64 - 1]),
        ("max_tokens", [None, 1, 10**6]),
        ("logprobs", [None, 0, 20]),
        ("stop_token_ids", [None, [], [0, 5], (7,)]),
        ("stop", [None, [], "a", ["a", "b"], ("a",)]),
    ],
)
def test_the_edges_of_what_is_allowed(field, values):
    for value in values:
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "values", "allowed"),
    [
        ("n", [0, -1, 129, True, "1", 1.0, None], "an integer in 1..128"),
        ("temperature", [-0.1, 100.1, math.nan, math.inf, "1", True, None], "a number in 0..100"),
        ("top_p", [0, -0.1, 1.1, math.nan, "1", None, False], "a number p with 0 < p <= 1"),
        ("top_k", [-2, 1.5, "3", 2**31, None], "-1 or 0 (off), or an integer >= 1"),
        ("min_p", [-0.1, 1.1, math.nan, None], "a number in 0..1"),
        ("seed", [-2, 2**64, "7", 1.0, True], "an integer in 0..2^64-1, or none or -1 for a random one"),
        ("max_tokens", [0, -1, "16", 1.0, True], "an integer >= 1, or none for what the context leaves"),
        ("logprobs", [-1, 21, 10**6, True, "5"], "an integer in 0..20, or none"),
        ("stop", ["", ["a", ""], [1], 5, b"a"], "a text or a list of texts, none of them empty"),
        ("stop_token_ids", [5, "5"], "a list of token ids"),
        ("ignore_eos", [0, None, "true"], "true or false"),
        ("detokenize", [0, None, "no"], "true or false"),
        ("skip_special_tokens", [1], "true or false"),
        ("include_stop_str_in_output", [1], "true or false"),
    ],
)
def test_a_refusal_names_field_value_and_what_is_allowed(field, values, allowed):
    for value in values:
        with pytest.raises(InvalidRequest) as refusal:
            SamplingParams(**{field: value})
        message = str(refusal.value)
        assert message.startswith(f"{field} is ")
        assert message.endswith(f", allowed: {allowed}")


@pytest.mark.parametrize("ids", [[-1], [2**31], [True], ["5"], [1.0]])
def test_each_stop_token_id_is_checked(ids):
    with pytest.raises(InvalidRequest, match=r"^stop_token_ids is .*, allowed: a list of token ids, each"):
        SamplingParams(stop_token_ids=ids)


def test_stop_strings_become_a_tuple():
    params = SamplingParams(stop="end")
    assert params.stop == ("end",)
    assert params.stop_strings is not None
    assert params.stop_strings.stops == ("end",)
    assert params.stop_strings is params.stop_strings
    assert SamplingParams(stop=[]).stop_strings is None
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop_token_ids=[3, 4]).stop_ids == (3, 4)


def test_a_seed_of_minus_one_is_none():
    assert SamplingParams(seed=-1) == SamplingParams()


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "n", "seed", "max_tokens"])
@pytest.mark.parametrize("digits", [400, 5000])
def test_integers_beyond_every_float_are_refused(field, digits):
    with pytest.raises(InvalidRequest, match=f"^{field} is .*, allowed: ") as refusal:
        SamplingParams(**{field: -(10**digits)})
    assert len(str(refusal.value)) < 400


def test_refusals_are_value_errors():
    assert issubclass(InvalidRequest, ValueError)


def test_an_unknown_parameter_is_a_type_error():
    with pytest.raises(TypeError, match="beam_width"):
        SamplingParams(beam_width=4)
