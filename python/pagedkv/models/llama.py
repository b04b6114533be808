"""The forward pass of the Llama family: Llama, SmolLM2, Mistral, Qwen2 and Qwen3.

They are told apart by `ModelConfig` alone. Parameters are named as the checkpoints name them, so loading is a
walk over names; `LlamaForCausalLM.pack` then turns the weights into what the backend multiplies with, several
into one where they share their input. Hidden states are [T, hidden], the tokens of all sequences of the step
one after another: no batch dimension, no padding, no mask. Who computes (`ops`), what (`batch`) and where the
keys lie (`kv_cache`) are arguments of `forward`; the modules hold weights and angles only.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from pagedkv.batch import StepBatch
from pagedkv.kv_cache import KVCache
from pagedkv.models.config import ModelConfig
from pagedkv.models.rope import cos_sin_table
from pagedkv.ops import Ops, PackedWeight


class RMSNorm(nn.Module):
    """Scales rows to a root mean square of 1, then by a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """[T, size] -> [T, size]."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor, ops: Ops) -> Tensor:
        """Adds x to `residual`, in place, and scales the sum: [T, size] -> [T, size]."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


class Embedding(nn.Module):
    """A row [size] for each token id.

    Not `nn.Embedding`: its initialisation is wasted on weights that are loaded, and on the meta device it
    imports torch's compiler, which takes more than a second.
    """

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, size))

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, size]."""
        return nn.functional.embedding(token_ids, self.weight)


class Linear(nn.Module):
    """A weight [out, in] and perhaps a bias [out], as the checkpoint has them, until they are packed."""

    def __init__(self, in_size: int, out_size: int, bias: bool) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(out_size, in_size))
        self.bias: nn.Parameter | None = nn.Parameter(torch.empty(out_size)) if bias else None


def pack(ops: Ops, parts: Sequence[Linear], *, release: bool, gated: bool = False) -> PackedWeight:
    """Packs layers that read the same input into one; `release` drops their own tensors."""
    weights = [part.weight for part in parts if part.weight is not None]
    if len(weights) != len(parts):
        raise ValueError("the weights were released when they were packed before")
    packed = ops.pack_linear(weights, [part.bias for part in parts], gated=gated)
    if release:
        for part in parts:
            part.weight = part.bias = None
    return packed


class Attention(nn.Module):
    """Grouped-query attention through the paged cache."""

    qkv: PackedWeight
    out: PackedWeight

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.head_counts = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        self.scale = config.head_dim**-0.5
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, query_size, config.attention_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, config.attention_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, config.attention_bias)
        self.o_proj = Linear(query_size, config.hidden_size, config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def pack(self, ops: Ops, *, release: bool) -> None:
        """See `LlamaForCausalLM.pack`."""
        self.qkv = pack(ops, [self.q_proj, self.k_proj, self.v_proj], release=release)
        self.out = pack(ops, [self.o_proj], release=release)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor],
        batch: StepBatch,
        cache: tuple[Tensor, Tensor],
        ops: Ops,
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; writes this step's keys and values into `cache` on the way."""
        num_tokens = len(x)
        heads = ops.linear(x, self.qkv).view(num_tokens, -1, self.head_dim)
        q, k, v = torch.split(heads, self.head_counts, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q.reshape(-1, self.head_dim), ops).view(q.shape)
            k = self.k_norm(k.reshape(-1, self.head_dim), ops).view(k.shape)
        q = ops.rope_cache(q, k, v, *angles, batch.positions, *cache, batch.slot_mapping)
        mixed = ops.paged_attention(q, *cache, batch, self.scale)
        return ops.linear(mixed.reshape(num_tokens, -1), self.out)


class MLP(nn.Module):
    """The gated feed-forward layer."""

    gate_up: PackedWeight
    down: PackedWeight

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def pack(self, ops: Ops, *, release: bool) -> None:
        """See `LlamaForCausalLM.pack`."""
        self.gate_up = pack(ops, [self.gate_proj, self.up_proj], release=release, gated=True)
        self.down = pack(ops, [self.down_proj], release=release)

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return ops.linear(ops.linear(x, self.gate_up), self.down)


class Layer(nn.Module):
    """One decoder layer: attention and feed-forward, each after a norm and added to what came in."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def pack(self, ops: Ops, *, release: bool) -> None:
        """See `LlamaForCausalLM.pack`."""
        self.self_attn.pack(ops, release=release)
        self.mlp.pack(ops, release=release)

    def forward(
        self,
        residual: Tensor,
        update: Tensor | None,
        angles: tuple[Tensor, Tensor],
        batch: StepBatch,
        cache: tuple[Tensor, Tensor],
        ops: Ops,
    ) -> Tensor:
        """[T, hidden] -> [T, hidden].

        `update` is what the layer before returned: it is added to `residual`, in place, together with the
        norm that reads the sum. What this layer returns is still to be added.
        """
        norm = self.input_layernorm
        x = norm(residual, ops) if update is None else norm.add(update, residual, ops)
        update = self.self_attn(x, angles, batch, cache, ops)
        out: Tensor = self.mlp(self.post_attention_layernorm.add(update, residual, ops), ops)
        return out


class Decoder(nn.Module):
    """Embedding, layers and the last norm.

    Attributes:
        tied: the packed output layer, where it is the embedding as well; then `embed_tokens` is not read.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.tied: PackedWeight | None = None

    def forward(
        self,
        batch: StepBatch,
        angles: tuple[Tensor, Tensor],
        kv_cache: KVCache,
        ops: Ops,
        before_layer: Callable[[], None] | None,
    ) -> Tensor:
        """Hidden states after the last layer, of the sampled rows only: [R, hidden]."""
        if self.tied is None:
            residual = self.embed_tokens(batch.token_ids)
        else:
            residual = ops.embedding(batch.token_ids, self.tied)
        update = None
        for layer, cache in zip(self.layers, kv_cache.layers, strict=True):
            if before_layer is not None:
                before_layer()
            update = layer(residual, update, angles, batch, cache, ops)
        assert update is not None, "a model has layers"
        # The norm works row by row, so the rows nobody samples need not go through it.
        return self.norm.add(update[batch.sample_rows], residual[batch.sample_rows], ops)


class LlamaForCausalLM(nn.Module):
    """The whole model. `pack` and `set_max_len` must have been called before the first `forward`."""

    head: PackedWeight

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.angles: tuple[Tensor, Tensor] | None = None

    def pack(self, ops: Ops, *, release: bool = False, progress: bool = False) -> None:
        """Prepares the weights for a backend, layer by layer; `forward` must be given the same one.

        Args:
            ops: The backend.
            release: Drop what was packed, so that no weight is held twice. The model cannot be packed again.
            progress: Show a bar.
        """
        for layer in tqdm(self.model.layers, desc="packing weights", disable=not progress, leave=False):
            layer.pack(ops, release=release)
        embedding = self.model.embed_tokens
        is_tied = embedding.weight is self.lm_head.weight
        self.head = pack(ops, [self.lm_head], release=release)
        self.model.tied = self.head if is_tied else None
        if is_tied and release:
            embedding.register_parameter("weight", None)

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
        return ops.linear(hidden, self.head, torch.float32)
