"""What a checkpoint says of itself, as one `ModelConfig` whatever its format.

Two readers fill it: `hf_config` (config.json as transformers 4 and 5 write it) and `gguf_config` (metadata).
Both refuse by name what the code does not do: a setting that is silently ignored answers fluently and
wrongly.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagedkv.errors import ModelError
from pagedkv.models.rope import RopeConfig
from pagedkv.plan import kv_bytes_per_token

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Far more than anything that has been built. A weight has less than 2^48 elements then, which torch can count
# without making it, so that the files can be found not to fit.
MAX_WIDTH = 2**24
# Products of what fits here and a RoPE factor can be written as a float.
MAX_INT = 2**63 - 1


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model and the choices its family leaves open."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool  # on q, k and v
    output_bias: bool  # on o
    mlp_bias: bool
    qk_norm: bool  # an RMS norm over each head of q and k, before the rotation
    max_position_embeddings: int  # the trained length in tokens, the reach of its RoPE scaling included
    max_len_cap: int | None = None  # a tighter limit than the trained length
    max_len_reason: str = ""  # why there is that limit, for the user
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype | None = None  # the checkpoint's; None where it does not say, or is quantised

    @property
    def max_len(self) -> int:
        """Most tokens that a sequence may have."""
        return min(self.max_position_embeddings, self.max_len_cap or self.max_position_embeddings)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one token takes in all layers together."""
        return kv_bytes_per_token(self.num_layers, self.num_kv_heads, self.head_dim, dtype.itemsize)

    def __post_init__(self) -> None:
        """Checks what every format must obey."""
        for name, width in (
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("vocab_size", self.vocab_size),
            ("the heads together", self.num_heads * self.head_dim),
        ):
            if width > MAX_WIDTH:
                raise ModelError(f"the width of {name} is {width}; at most {MAX_WIDTH} is supported")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads evenly"
            )
        if self.head_dim % 2:
            raise ModelError(f"head_dim is {self.head_dim}; rotary embeddings need an even one")
        if not (math.isfinite(self.rms_norm_eps) and self.rms_norm_eps > 0):
            raise ModelError(f"rms_norm_eps is {self.rms_norm_eps}; it must be a number above 0")


def positive_int(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """The field as an integer in 1..2^63-1; null and absent are the default.

    Raises:
        ModelError: It is missing and has no default, or is something else.
    """
    value = config.get(field)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"the model's config has no {field}")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{field} is {value!r} in the model's config; it must be an integer of at least 1")
    if value > MAX_INT:
        raise ModelError(f"{field} is above 2^63-1 in the model's config; no model has that much")
    return value


def number(config: Mapping[str, Any], field: str, default: float | None = None) -> float:
    """The field as a finite float; null and absent are the default.

    Raises:
        ModelError: It is missing and has no default, or is no finite number.
    """
    value = config.get(field)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"the model's config has no {field}")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{field} is {value!r} in the model's config; it must be a finite number")
    try:
        result = float(value)
    except OverflowError:  # An integer in JSON may have any number of digits.
        result = math.inf
    if not math.isfinite(result):
        raise ModelError(f"{field} is {result} in the model's config; it must be a finite number")
    return result
