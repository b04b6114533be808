"""Frequencies and angles against transformers, for each kind and its corner cases."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pagedkv.errors import ModelError
from pagedkv.models.hf_config import read_hf_config
from pagedkv.models.rope import cos_sin_table, inv_freq
from tiny_models import ROPE_KINDS

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("default", {}),
    ("linear", {"factor": 2.5}),
    ("dynamic", {"factor": 3.3}),
    ("llama3", LLAMA3),
    ("llama3", {**LLAMA3, "factor": 32.0}),
    ("llama3", {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 3.0}),
    ("yarn", YARN),
    ("yarn", {**YARN, "factor": 1.0}),
    ("yarn", {**YARN, "beta_fast": 16, "beta_slow": 2}),
    ("yarn", {**YARN, "truncate": False}),
    ("yarn", {**YARN, "attention_factor": 0.7}),
    ("yarn", {**YARN, "mscale": 0.8, "mscale_all_dim": 1.2}),
    ("yarn", {**YARN, "mscale": 1.0}),
    ("yarn", {**YARN, "beta_fast": None, "attention_factor": None}),
]


def config_json(rope: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 512,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 200,
        "max_position_embeddings": 131072,
        "rope_parameters": rope,
        **fields,
    }


@pytest.mark.parametrize(("kind", "parameters"), CASES)
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_frequencies_and_angles_equal_transformers(
    kind: str, parameters: dict[str, Any], theta: float, head_dim: int
) -> None:
    config = config_json({"rope_type": kind, "rope_theta": theta, **parameters}, head_dim=head_dim)
    ours = read_hf_config(config)
    fields = {key: value for key, value in config.items() if key != "architectures"}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**fields))
    assert torch.equal(inv_freq(ours.rope, head_dim), theirs.inv_freq)
    cos, sin = cos_sin_table(ours.rope, head_dim, 20_001)
    positions = torch.tensor([[0, 1, 1000, 8000, 20_000]])
    their_cos, their_sin = theirs(torch.empty(0), positions)
    assert torch.allclose(cos[positions[0]], their_cos[0], atol=1e-6, rtol=0)
    assert torch.allclose(sin[positions[0]], their_sin[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ROPE_KINDS)
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_the_dialects_of_transformers_4_and_5_say_the_same(kind: str, type_key: str) -> None:
    parameters = dict(next(fields for name, fields in CASES if name == kind))
    new = read_hf_config(config_json({"rope_type": kind, "rope_theta": 70_000.0, **parameters}))
    old_config = config_json({}, rope_scaling={type_key: kind, **parameters}, rope_theta=70_000.0)
    del old_config["rope_parameters"]
    assert read_hf_config(old_config) == new
    assert new.rope.kind == kind
    assert new.rope.theta == 70_000.0


@pytest.mark.parametrize("nothing", [None, {}])
def test_null_is_absent(nothing: Any) -> None:
    absent = config_json({})
    del absent["rope_parameters"]
    expected = read_hf_config(absent)
    assert expected.rope.kind == "default"
    assert expected.rope.theta == 10_000.0
    assert read_hf_config(config_json(nothing, rope_scaling=nothing)) == expected


def test_the_trained_length_includes_what_scaling_reaches() -> None:
    stretched = {"rope_type": "linear", "factor": 4.0}
    linear = read_hf_config(config_json(stretched, max_position_embeddings=2048))
    assert linear.max_len == 8192
    yarn = read_hf_config(config_json({"rope_type": "yarn", **YARN}, max_position_embeddings=32768))
    assert yarn.max_len == 131072
    whole = read_hf_config(config_json({"rope_type": "yarn", **YARN}))
    assert whole.max_len == 131072
    llama3 = read_hf_config(config_json({"rope_type": "llama3", **LLAMA3}))
    assert llama3.max_len == 131072


def test_dynamic_is_capped_at_the_trained_length() -> None:
    config = read_hf_config(
        config_json({"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=2048)
    )
    assert config.max_len == 2048
    assert "dynamic RoPE" in config.max_len_reason


def test_original_length_beside_the_parameters_takes_precedence() -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    config = read_hf_config(config_json(rope, original_max_position_embeddings=4096))
    assert config.rope.original_max_len == 4096


def test_a_missing_yarn_factor_is_the_ratio_of_the_lengths() -> None:
    rope = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32768}
    assert read_hf_config(config_json(rope)).rope.factor == 4.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "su"}}, "type 'su' is not supported; supported are default, linear"),
        ({"rope_parameters": {"rope_type": "linear"}}, "no factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "4"}}, "factor is '4'"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0.0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": float("nan")}}, "factor is nan"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "no low_freq_factor"),
        ({"rope_parameters": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "0 < low < high"),
        ({"rope_parameters": {"rope_type": "yarn", **YARN, "beta_slow": 64}}, "fast >= slow"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, "mrope_section"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"rope_type": "yarn", "type": "linear", **YARN}}, "but type 'linear'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs by layer type"),
        ({"rope_parameters": [1]}, "must be an object or null"),
        ({"rope_parameters": []}, r"rope_parameters is \[\] .* must be an object or null"),
        ({"rope_scaling": False}, "rope_scaling is False .* must be an object or null"),
        ({"rope_parameters": {"rope_type": ["linear"]}}, "is not supported; supported are default, linear"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 1e300}},
            r"factor is 1e\+300; it must be above 0",
        ),
        ({"rope_parameters": {"rope_theta": 0.5}}, "rope_theta is 0.5"),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                "rope_scaling": {"type": "linear", "factor": 4.0},
            },
            "contradict each other",
        ),
    ],
)
def test_what_is_not_done_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_hf_config({**config_json({}), **fields})
