"""The forward pass of the Llama family: Llama, SmolLM2, Mistral, Qwen2 and Qwen3.

They are told apart by `ModelConfig` alone. Parameters are named as the checkpoints name them, so loading is a
walk over names. Hidden states are [T, hidden], the tokens of all sequences of the step one after another: no
batch dimension, no padding, no mask. Who computes (`ops`), what (`batch`) and where the keys lie (`kv_cache`)
are arguments of `forward`; the modules hold weights and angles only.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pagedkv.batch import StepBatch
from pagedkv.kv_cache import KVCache
from pagedkv.models.config import ModelConfig
from pagedkv.models.rope import cos_sin_table
from pagedkv.ops import Ops


class RMSNorm(nn.Module):
    """Scales rows to a root mean square of 1, then by a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """[T, size] -> [T, size]."""
        return ops.rms_norm(x, self.weight, self.eps)


class Linear(nn.Module):
    """A weight [out, in] and perhaps a bias [out]; the backend multiplies."""

    def __init__(self, in_size: int, out_size: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size))
        self.bias = nn.Parameter(torch.empty(out_size)) if bias else None

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """[T, in] -> [T, out]."""
        return ops.linear(x, self.weight, self.bias)


class Attention(nn.Module):
    """Grouped-query attention through the paged cache."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, query_size, config.attention_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, config.attention_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, config.attention_bias)
        self.o_proj = Linear(query_size, config.hidden_size, config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        batch: StepBatch,
        cache: tuple[Tensor, Tensor],
        ops: Ops,
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; writes this step's keys and values into `cache` on the way."""
        q, k, v = self.q_proj(x, ops), self.k_proj(x, ops), self.v_proj(x, ops)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q.view(-1, self.head_dim), ops)
            k = self.k_norm(k.view(-1, self.head_dim), ops)
        num_tokens = len(x)
        q = ops.rope_cache(
            q.view(num_tokens, -1, self.head_dim),
            k.view(num_tokens, -1, self.head_dim),
            v.view(num_tokens, -1, self.head_dim),
            *angles,
            batch.positions,
            *cache,
            batch.slot_mapping,
        )
        mixed = ops.paged_attention(q, *cache, batch, self.scale)
        out: Tensor = self.o_proj(mixed.reshape(num_tokens, -1), ops)
        return out


class MLP(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        out: Tensor = self.down_proj(ops.silu_mul(self.gate_proj(x, ops), self.up_proj(x, ops)), ops)
        return out


class Layer(nn.Module):
    """One decoder layer: attention and feed-forward, each after a norm and added to what came in."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        batch: StepBatch,
        cache: tuple[Tensor, Tensor],
        ops: Ops,
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        x = x + self.self_attn(self.input_layernorm(x, ops), angles, batch, cache, ops)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x, ops), ops)
        return out


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        batch: StepBatch,
        angles: tuple[Tensor, Tensor],
        kv_cache: KVCache,
        ops: Ops,
        before_layer: Callable[[], None] | None,
    ) -> Tensor:
        """Hidden states after the last layer, of the sampled rows only: [R, hidden]."""
        x = self.embed_tokens(batch.token_ids)
        for layer, cache in zip(self.layers, kv_cache.layers, strict=True):
            if before_layer is not None:
                before_layer()
            x = layer(x, angles, batch, cache, ops)
        # The norm works row by row, so the rows nobody samples need not go through it.
        out: Tensor = self.norm(x[batch.sample_rows], ops)
        return out


class LlamaForCausalLM(nn.Module):
    """The whole model. `set_max_len` must have been called before the first `forward`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.angles: tuple[Tensor, Tensor] | None = None

    def set_max_len(self, max_len: int, device: torch.device | str) -> None:
        """Computes the table of RoPE angles for positions below `max_len`."""
        if not 1 <= max_len <= self.config.max_len:
            raise ValueError(f"max_len is {max_len}; the model allows 1..{self.config.max_len}")
        cos, sin = cos_sin_table(self.config.rope, self.config.head_dim, max_len)
        self.angles = (cos.to(device), sin.to(device))

    def forward(
        self,
        batch: StepBatch,
        kv_cache: KVCache,
        ops: Ops,
        before_layer: Callable[[], None] | None = None,
    ) -> Tensor:
        """Computes a step, and returns the f32 logits [R, vocab] of the sampled rows.

        The keys and values of all its tokens are written to the cache on the way. The batch's copies must
        have been done before. Positions must be below the length given to `set_max_len`. `before_layer` is
        called before each layer.
        """
        assert self.angles is not None, "set_max_len was not called"
        hidden = self.model(batch, self.angles, kv_cache, ops, before_layer)
        logits: Tensor = self.lm_head(hidden, ops)
        return logits.float()
