"""Reads a Hugging Face config.json, in the dialects of transformers 4 and 5, into a `ModelConfig`.

Defaults are those of transformers' configuration classes for each family, because a config.json may leave out
what equals them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagedkv.errors import ModelError
from pagedkv.models.config import DTYPES, ModelConfig, number, positive_int
from pagedkv.models.rope import RopeConfig, yarn_attention_factor


@dataclass(frozen=True)
class Family:
    """What transformers assumes of a family where its config.json is silent, and what sets it apart."""

    model_type: str
    max_position_embeddings: int
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / heads
    sliding_window: int | None = None
    window_is_opt_in: bool = (
        False  # only with use_sliding_window, and only in the layers that layer_types says
    )
    qkv_bias: bool = False  # always there
    bias_fields: tuple[str, ...] = ()  # which bias switches the family has
    qk_norm: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family("llama", 2048, bias_fields=("attention_bias", "mlp_bias")),
    "MistralForCausalLM": Family("mistral", 4096 * 32, num_kv_heads=8, sliding_window=4096),
    "Qwen2ForCausalLM": Family(
        "qwen2", 32768, num_kv_heads=32, sliding_window=4096, window_is_opt_in=True, qkv_bias=True
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        32768,
        num_kv_heads=32,
        head_dim=128,
        sliding_window=4096,
        window_is_opt_in=True,
        bias_fields=("attention_bias",),
        qk_norm=True,
    ),
}

# Fields of the wider family tree that change the computation, with the values that change nothing. None
# always is one.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "compression_config": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "moe_num_experts": (0,),
    "n_routed_experts": (0,),
    "no_rope_layer_interval": (0,),
    "no_rope_layers": ([],),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rotary_pct": (1,),
    "use_bidirectional_attention": (False,),
}

_ROPE_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_ROPE_FIELDS = {
    "default": set(),
    "linear": {"factor", "original_max_position_embeddings"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",  # says how the model came about, not how it computes
    },
}


def read_hf_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Reads config.json, and generation_config.json where there is one.

    Raises:
        ModelError: A field is missing, has an impossible value, or asks for what the code does not do.
    """
    architecture, family = _family(config)
    _refuse(config, family)
    hidden_size = positive_int(config, "hidden_size")
    num_heads = positive_int(config, "num_attention_heads")
    num_layers = positive_int(config, "num_hidden_layers")
    vocab_size = positive_int(config, "vocab_size")
    # A null, as opposed to an absent field, means one key/value head for each query head.
    default_kv_heads = family.num_kv_heads if "num_key_value_heads" not in config else None
    if config.get("head_dim", family.head_dim) is None and hidden_size % num_heads:
        raise ModelError(f"hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}")
    trained_len = positive_int(config, "max_position_embeddings", family.max_position_embeddings)
    rope, reach = _rope(config, trained_len)
    cap, reason = _max_len_cap(config, family, num_layers, rope, trained_len)
    if cap is not None and cap >= reach and rope.kind != "dynamic":
        cap, reason = None, ""
    attention_bias = _flag(config, "attention_bias")
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=positive_int(config, "num_key_value_heads", default_kv_heads or num_heads),
        head_dim=positive_int(
            config,
            "head_dim",
            (family.head_dim if "head_dim" not in config else None) or hidden_size // num_heads,
        ),
        hidden_size=hidden_size,
        intermediate_size=positive_int(config, "intermediate_size"),
        vocab_size=vocab_size,
        rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        attention_bias=family.qkv_bias or attention_bias,
        output_bias=attention_bias and not family.qkv_bias,
        mlp_bias=_flag(config, "mlp_bias"),
        qk_norm=family.qk_norm,
        max_position_embeddings=reach,
        max_len_cap=cap,
        max_len_reason=reason,
        eos_token_ids=_eos_token_ids(config, generation or {}, vocab_size),
        dtype=_dtype(config),
    )


def _family(config: Mapping[str, Any]) -> tuple[str, Family]:
    """The architecture that the config names, by `architectures` or else by `model_type`."""
    names = config.get("architectures") or []
    model_type = config.get("model_type")
    if not names:
        names = [name for name, family in FAMILIES.items() if family.model_type == model_type]
    supported = ", ".join(FAMILIES)
    # In the list, not in the dict: JSON may hold what has no hash.
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(FAMILIES):
        asked = names if names else f"none, with model_type {model_type!r}"
        raise ModelError(f"the model's architectures are {asked}; supported are {supported}")
    family = FAMILIES[names[0]]
    if model_type not in (None, family.model_type):
        raise ModelError(f"model_type is {model_type!r}, but {names[0]} belongs to {family.model_type!r}")
    return names[0], family


def _refuse(config: Mapping[str, Any], family: Family) -> None:
    """Refuses what changes the computation and is not built."""
    # Only an absent field means the default; transformers fails on a null.
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"hidden_act is {activation!r}; supported is 'silu'")
    for field, neutral in _NEUTRAL.items():
        value = config.get(field)
        if value is not None and value not in neutral:
            allowed = " or ".join(["absent", *(repr(entry) for entry in neutral)])
            raise ModelError(
                f"{field} is {value!r} in the model's config, which is not supported; it must be {allowed}"
            )
    for field in ("attention_bias", "mlp_bias"):
        always = field == "attention_bias" and family.qkv_bias
        if _flag(config, field) and field not in family.bias_fields and not always:
            raise ModelError(f"{field} is true, which the {family.model_type} family does not have")
    for field in ("use_qk_norm", "qk_layernorm"):
        if _flag(config, field) and not family.qk_norm:
            raise ModelError(f"{field} is true, which the {family.model_type} family does not have")


def _flag(config: Mapping[str, Any], field: str) -> bool:
    value = config.get(field)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ModelError(f"{field} is {value!r} in the model's config; it must be true or false")
    return value


def _rope(config: Mapping[str, Any], trained_len: int) -> tuple[RopeConfig, int]:
    """The RoPE, and the length in tokens that it reaches.

    transformers 4 writes `rope_scaling` with `type` or `rope_type` beside `rope_theta`; transformers 5 writes
    all of it into `rope_parameters`. Where both are there they must say the same.
    """
    found = []
    for field in ("rope_parameters", "rope_scaling"):
        # Null and {} say nothing. transformers treats them alike.
        parameters = config.get(field)
        if parameters is None:
            continue
        if not isinstance(parameters, Mapping):
            raise ModelError(f"{field} is {parameters!r} in the model's config; it must be an object or null")
        if parameters:
            found.append(_rope_from(parameters, field, config, trained_len))
    if not found:
        return _rope_from({}, "rope_parameters", config, trained_len)
    if len(found) == 2 and found[0] != found[1]:
        raise ModelError(
            "rope_parameters and rope_scaling contradict each other in the model's config; keep one"
        )
    return found[0]


def _rope_from(
    parameters: Mapping[str, Any], field: str, config: Mapping[str, Any], trained_len: int
) -> tuple[RopeConfig, int]:
    """One of the two dialects of `_rope`."""
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ModelError(f"{field} differs by layer type ({', '.join(parameters)}), which is not supported")
    kinds = {str(parameters[key]) for key in ("rope_type", "type") if parameters.get(key) is not None} or {
        "default"
    }
    kind = kinds.pop()
    if kinds:
        raise ModelError(f"{field} has rope_type {parameters['rope_type']!r} but type {parameters['type']!r}")
    allowed = _ROPE_FIELDS.get(kind)
    if allowed is None:
        raise ModelError(f"RoPE of type {kind!r} is not supported; supported are {', '.join(_ROPE_FIELDS)}")
    for key, value in parameters.items():
        if value is not None and key not in allowed | _ROPE_COMMON:
            raise ModelError(f"{field}.{key} is {value!r}, which RoPE of type {kind} does not have")
    if number(parameters, "partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"{field}.partial_rotary_factor is {parameters['partial_rotary_factor']}; supported is 1.0"
        )
    # A `rope_scaling` beside `rope_parameters` shares its theta.
    shared = config.get("rope_parameters") or {}
    theta = number(
        parameters, "rope_theta", number(shared, "rope_theta", number(config, "rope_theta", 10_000.0))
    )
    if kind == "default":
        return RopeConfig(theta=theta), trained_len
    # Phi's habit of writing this one beside the others takes precedence in transformers too.
    original = positive_int(
        config,
        "original_max_position_embeddings",
        positive_int(parameters, "original_max_position_embeddings", trained_len),
    )
    if kind == "yarn":
        return _yarn_from(parameters, theta, original, trained_len)
    factor = number(parameters, "factor")
    if kind == "linear":
        return RopeConfig("linear", theta, factor), max(trained_len, int(original * factor))
    if kind == "dynamic":
        return RopeConfig("dynamic", theta, factor), min(trained_len, original)
    low, high = number(parameters, "low_freq_factor"), number(parameters, "high_freq_factor")
    return RopeConfig(kind, theta, factor, original, low_freq_factor=low, high_freq_factor=high), trained_len


def _yarn_from(
    parameters: Mapping[str, Any], theta: float, original: int, trained_len: int
) -> tuple[RopeConfig, int]:
    """Yarn's numbers, with the defaults of transformers: a missing factor is the ratio of the two lengths."""
    factor = number(parameters, "factor", trained_len / original)
    mscale, mscale_all_dim = number(parameters, "mscale", 0.0), number(parameters, "mscale_all_dim", 0.0)
    rope = RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        attention_factor=number(
            parameters, "attention_factor", yarn_attention_factor(factor, mscale, mscale_all_dim)
        ),
        beta_fast=number(parameters, "beta_fast") if parameters.get("beta_fast") else 32.0,
        beta_slow=number(parameters, "beta_slow") if parameters.get("beta_slow") else 1.0,
        truncate=parameters.get("truncate") is None or _flag(parameters, "truncate"),
    )
    return rope, max(trained_len, int(original * factor))


def _max_len_cap(
    config: Mapping[str, Any], family: Family, num_layers: int, rope: RopeConfig, trained_len: int
) -> tuple[int | None, str]:
    """The longest sequence for which full attention and fixed angles are exact, and why it is limited."""
    window = _window(config, family)
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            raise ModelError(
                f"layer_types is {layer_types!r} in the model's config; it must be a list or null"
            )
        for layer_type in layer_types:
            if layer_type not in ("full_attention", "sliding_attention"):
                raise ModelError(
                    f"layer_types holds {layer_type!r}; supported are full_attention and sliding_attention"
                )
        if len(layer_types) != num_layers:
            raise ModelError(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
        if "sliding_attention" in layer_types and window is None:
            raise ModelError("layer_types asks for sliding_attention, but there is no sliding_window in use")
    if window is not None and family.window_is_opt_in:
        slides = (
            "sliding_attention" in layer_types
            if layer_types is not None
            else _int_or_zero(config, "max_window_layers", 28) < num_layers
        )
        window = window if slides else None
    if window is not None and (rope.kind != "dynamic" or window < trained_len):
        return window, f"the model attends to a sliding window of {window} tokens"
    if rope.kind == "dynamic":
        return (
            trained_len,
            f"its dynamic RoPE is stable only up to the trained length of {trained_len} tokens",
        )
    return None, ""


def _window(config: Mapping[str, Any], family: Family) -> int | None:
    """The sliding window in tokens, or None where there is none or it is not in use."""
    in_use = not family.window_is_opt_in
    if "use_sliding_window" in config:
        in_use = _flag(config, "use_sliding_window")
    window = config.get("sliding_window", family.sliding_window)
    return positive_int(config, "sliding_window", window) if in_use and window is not None else None


def _int_or_zero(config: Mapping[str, Any], field: str, default: int) -> int:
    """The field as an integer of at least 0; null and absent are the default."""
    return 0 if config.get(field) == 0 else positive_int(config, field, default)


def _eos_token_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int
) -> tuple[int, ...]:
    """Both files' ids, each an int, a list or null.

    An id without an entry in the vocabulary is refused: the answers that it should end would never end.
    """
    found: dict[int, None] = {}
    for where in (config, generation):
        value = where.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise ModelError(
                    f"eos_token_id is {value!r} in the model's config; it must be an integer or a list"
                )
            if not 0 <= token_id < vocab_size:
                raise ModelError(
                    f"eos_token_id {token_id} in the model's config is none of its tokens; "
                    f"it must be in 0..{vocab_size - 1}"
                )
            found[token_id] = None
    return tuple(found)


def _dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """`dtype` (transformers 5) or `torch_dtype` (4)."""
    value = config.get("dtype")
    if value is None:
        value = config.get("torch_dtype")
    if value is None or value == "auto":
        return None
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"the checkpoint's dtype is {name!r}; supported are {', '.join(DTYPES)}")
    return DTYPES[name]
