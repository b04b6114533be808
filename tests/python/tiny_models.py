"""Tiny random checkpoints of each family, made with transformers, and the demo model in transformers.

The weights are drawn ten times as wide as usual: with the default of 0.02 attention is so flat that a wrong
RoPE base changes no greedy token, and a test on such a model shows nothing.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm")
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic")

_CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "smollm": LlamaConfig,
}
_FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "smollm": {"tie_word_embeddings": True},
}
# The lengths are such that positions up to 8,000 are trained ones, and lie far beyond where a kind begins to
# stretch.
_ROPE: dict[str, tuple[dict[str, Any], int]] = {
    "default": ({}, 8192),
    "linear": ({"factor": 4.0}, 2048),
    "llama3": (
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
        8192,
    ),
    "yarn": ({"factor": 8.0, "original_max_position_embeddings": 1024}, 8192),
    "dynamic": ({"factor": 2.0}, 8192),
}


def make_tiny(
    family: str,
    path: Path,
    *,
    rope: str = "default",
    seed: int = 0,
    numbers: torch.dtype = torch.float32,
    **overrides: Any,
) -> PreTrainedModel:
    """Saves a random model of two layers to `path` and returns it, in f32 and ready to compute.

    Four query heads share two key/value heads of 16 elements; the vocabulary has 200 entries.

    Args:
        family: One of `FAMILIES`; smollm is a llama with tied embeddings.
        path: A directory, created if need be.
        rope: One of `ROPE_KINDS`.
        seed: Of the weights.
        numbers: What the weights are rounded to, though they are stored in f32.
        overrides: Fields of the config.
    """
    parameters, max_position_embeddings = _ROPE[rope]
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 200,
        "initializer_range": 0.2,
        "max_position_embeddings": max_position_embeddings,
        "rope_parameters": {"rope_type": rope, "rope_theta": 10_000.0, **parameters},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **_FAMILY_FIELDS.get(family, {}),
        **overrides,
    }
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(_CONFIGS[family](**fields), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        # Biases and norms begin as zeros and ones, where leaving one out would not show.
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
        elif "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        parameter.data = parameter.data.to(numbers).float()
    model.eval().save_pretrained(path)
    return model


def hf_from_demo() -> LlamaForCausalLM:
    """The demo model in transformers, in f32, with the weights that our own loader reads from its GGUF
    file."""
    from pagedkv.models import load_model

    loaded = load_model(None, "float32")
    config = loaded.config
    hf_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=list(config.eos_token_ids),
        pad_token_id=config.eos_token_ids[0],
    )
    model = LlamaForCausalLM(hf_config).to(torch.float32)
    missing, unexpected = model.load_state_dict(loaded.model.state_dict(), strict=False)
    assert not missing, missing
    assert not unexpected, unexpected
    model.tie_weights()
    return model.eval()
