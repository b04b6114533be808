"""The forward pass of the Llama family: Llama, SmolLM2, Mistral, Qwen2 and Qwen3.

They are told apart by `ModelConfig` alone. Parameters are named as the checkpoints name them, so loading is a
walk over names; `LlamaForCausalLM.pack` then turns the weights into what the backend multiplies with, several
into one where they share their input. What is computed with them is said in `pagedkv.ops.decoder`. Hidden
states are [T, hidden], the tokens of all sequences of the step one after another: no batch dimension, no
padding, no mask. Who computes (`ops`), what (`batch`) and where the keys lie (`kv_cache`) are arguments of
`forward`; the modules hold weights and angles only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from tqdm import tqdm

from pagedkv._core import Heartbeat
from pagedkv.batch import StepBatch
from pagedkv.kv_cache import KVCache
from pagedkv.models.config import ModelConfig
from pagedkv.models.rope import cos_sin_table
from pagedkv.ops import Ops, PackedWeight
from pagedkv.ops.decoder import DecoderWeights, LayerWeights


class RMSNorm(nn.Module):
    """The weight of a norm."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))


class Embedding(nn.Module):
    """A row [size] for each token id.

    Not `nn.Embedding`: its initialisation is wasted on weights that are loaded, and on the meta device it
    imports torch's compiler, which takes more than a second.
    """

    def __init__(self, num_rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_rows, size))


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
    """The parameters of grouped-query attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, query_size, config.attention_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, config.attention_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, config.attention_bias)
        self.o_proj = Linear(query_size, config.hidden_size, config.output_bias)
        self.q_norm = RMSNorm(config.head_dim) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim) if config.qk_norm else None


class MLP(nn.Module):
    """The parameters of the gated feed-forward layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)


class Layer(nn.Module):
    """The parameters of one decoder layer: attention and feed-forward, each after a norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size)
        self.mlp = MLP(config)

    def pack(self, ops: Ops, *, release: bool) -> LayerWeights:
        """See `LlamaForCausalLM.pack`. The norms share the memory of their parameters."""
        attention, mlp = self.self_attn, self.mlp
        head_norms = None
        if attention.q_norm is not None and attention.k_norm is not None:
            head_norms = (attention.q_norm.weight.detach(), attention.k_norm.weight.detach())
        return LayerWeights(
            input_norm=self.input_layernorm.weight.detach(),
            qkv=pack(ops, [attention.q_proj, attention.k_proj, attention.v_proj], release=release),
            head_norms=head_norms,
            out=pack(ops, [attention.o_proj], release=release),
            post_norm=self.post_attention_layernorm.weight.detach(),
            gate_up=pack(ops, [mlp.gate_proj, mlp.up_proj], release=release, gated=True),
            down=pack(ops, [mlp.down_proj], release=release),
        )


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size)


class LlamaForCausalLM(nn.Module):
    """The whole model. `pack` and `set_max_len` must have been called before the first `forward`.

    Attributes:
        packed: what is computed with.
        angles: cosines and sines.
    """

    packed: DecoderWeights

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
        config, embedding = self.config, self.model.embed_tokens
        layers = tqdm(self.model.layers, desc="packing weights", disable=not progress, leave=False)
        packed_layers = [layer.pack(ops, release=release) for layer in layers]
        is_tied = embedding.weight is self.lm_head.weight
        self.packed = DecoderWeights(
            embedding=None if is_tied else embedding.weight.detach(),
            layers=packed_layers,
            norm=self.model.norm.weight.detach(),
            head=pack(ops, [self.lm_head], release=release),
            eps=config.rms_norm_eps,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        if is_tied and release:
            embedding.register_parameter("weight", None)

    def set_max_len(self, max_len: int, device: torch.device | str) -> None:
        """Computes the table of RoPE angles for positions below `max_len`."""
        if not 1 <= max_len <= self.config.max_len:
            raise ValueError(f"max_len is {max_len}; the model allows 1..{self.config.max_len}")
        cos, sin = cos_sin_table(self.config.rope, self.config.head_dim, max_len)
        self.angles = (cos.to(device), sin.to(device))

    def forward(
        self, batch: StepBatch, kv_cache: KVCache, ops: Ops, heartbeat: Heartbeat | None = None
    ) -> Tensor:
        """Computes a step, and returns the f32 logits [R, vocab] of the sampled rows.

        The keys and values of all its tokens are written to the cache on the way. The batch's copies must
        have been done before. Positions must be below the length given to `set_max_len`. `heartbeat` beats
        before each layer.
        """
        assert self.angles is not None, "set_max_len was not called"
        return ops.forward(self.packed, batch, self.angles, kv_cache.layers, heartbeat)
