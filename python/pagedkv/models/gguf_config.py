"""Reads the metadata of a GGUF file into a `ModelConfig`.

GGUF has one key for each setting, under the architecture's name. A key that is not known here and not neutral
is refused: it asks for something.
"""

from typing import Any

import numpy as np

from pagedkv.errors import ModelError
from pagedkv.gguf_header import end_token_ids
from pagedkv.models.config import ModelConfig, number, positive_int
from pagedkv.models.gguf_file import GGUFFile
from pagedkv.models.rope import RopeConfig, yarn_attention_factor

# GGUF's architecture names, and whether q and k are normalised. Mistral and SmolLM files call themselves
# llama.
ARCHITECTURES = {"llama": False, "qwen2": False, "qwen3": True}

_KNOWN = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "tensor_data_layout",
    "vocab_size",
}
# Values that change nothing, for keys that are not known.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.attn_factor": (1.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_ext_factor": (1.0,),
}


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """Reads the metadata of a GGUF file.

    Raises:
        ModelError: A key is missing, has an impossible value, or asks for what the code does not do.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ModelError(f"general.architecture is {architecture!r}; supported are {supported}")
    prefix = f"{architecture}."
    values = {
        key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
    }
    _refuse(values)
    tensors = file.tensors
    num_heads = _uniform(values, "attention.head_count")
    hidden_size = positive_int(values, "embedding_length")
    head_dim = positive_int(values, "attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if positive_int(values, key, head_dim) != head_dim:
            raise ModelError(
                f"{key} is {values[key]}, but the heads have {head_dim} elements; they must be equal"
            )
    if "token_embd.weight" not in tensors:
        raise ModelError("the GGUF file has no tensor token_embd.weight")
    context_len = positive_int(values, "context_length")
    rope, reach = _rope(values, context_len, file)
    window = values.get("attention.sliding_window") or None
    binding = window is not None and window < reach
    vocab_size = tensors["token_embd.weight"].shape[0]
    return ModelConfig(
        architecture=architecture,
        num_layers=positive_int(values, "block_count"),
        num_heads=num_heads,
        num_kv_heads=_uniform(values, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=_uniform(values, "feed_forward_length"),
        vocab_size=vocab_size,
        rms_norm_eps=_shortest(number(values, "attention.layer_norm_rms_epsilon")),
        rope=rope,
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_up.bias" in tensors,
        qk_norm=ARCHITECTURES[architecture],
        max_position_embeddings=reach,
        max_len_cap=window if binding else None,
        max_len_reason=f"the model attends to a sliding window of {window} tokens" if binding else "",
        eos_token_ids=end_token_ids(file.metadata, vocab_size),
    )


def _refuse(values: dict[str, Any]) -> None:
    for key, value in values.items():
        if key in _KNOWN or not value or value in _NEUTRAL.get(key, ()):
            continue
        raise ModelError(f"the GGUF file sets {key} to {value!r}, which is not supported")


def _uniform(values: dict[str, Any], key: str, default: int | None = None) -> int:
    """A count that GGUF may give for each layer; it must be the same in all."""
    value = values.get(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ModelError(f"{key} differs by layer, which is not supported: {value}")
        values = {key: value[0]}
    return positive_int(values, key, default)


def _shortest(value: float) -> float:
    """The decimal that was meant by a float32: the shortest one that rounds to it (1e-5, not 9.99e-6)."""
    return float(str(np.float32(value)))


def _rope(values: dict[str, Any], context_len: int, file: GGUFFile) -> tuple[RopeConfig, int]:
    """The RoPE, and the length in tokens that it reaches.

    Llama 3's scaling is no setting in GGUF but a tensor, rope_freqs.weight, of what each frequency is divided
    by.
    """
    theta = _shortest(number(values, "rope.freq_base", 10_000.0))
    kind = values.get("rope.scaling.type") or ("linear" if values.get("rope.scale_linear") else "none")
    factor = _shortest(number(values, "rope.scaling.factor", number(values, "rope.scale_linear", 1.0))) or 1.0
    original = positive_int(values, "rope.scaling.original_context_length", context_len)
    divisors: tuple[float, ...] = ()
    if "rope_freqs.weight" in file.tensors:
        divisors = tuple(file.read("rope_freqs.weight").ravel().tolist())
    if kind == "none":
        return RopeConfig(theta=theta, divisors=divisors), context_len
    reach = max(context_len, int(original * factor))
    if kind == "linear":
        return RopeConfig("linear", theta, factor, divisors=divisors), reach
    if kind == "yarn":
        rope = RopeConfig(
            "yarn",
            theta,
            factor,
            original,
            attention_factor=yarn_attention_factor(factor, None, None),
            beta_fast=number(values, "rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=number(values, "rope.scaling.yarn_beta_slow", 1.0),
            divisors=divisors,
        )
        return rope, reach
    raise ModelError(f"rope.scaling.type is {kind!r}; supported are none, linear and yarn")
