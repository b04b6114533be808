"""A decoder layer of the Llama family: what it is made of, and what it computes, operation by operation.

`pagedkv.models.llama` packs a `LayerWeights` for each of its layers and hands it to `Ops.decoder_layer`. A backend
that has no kernel for a whole layer composes its own operations with `compose`; for one that has, this says what
is right.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pagedkv.batch import StepBatch

if TYPE_CHECKING:
    from pagedkv.ops import Ops, PackedWeight


@dataclass(frozen=True)
class LayerWeights:
    """The weights of a layer, packed by the backend that is to compute it, and its constants.

    H query heads, G key/value heads, D head_dim.
    """

    input_norm: Tensor  # [hidden]; before attention
    qkv: "PackedWeight"  # hidden -> (H + 2 G) D: queries, keys, values
    head_norms: tuple[Tensor, Tensor] | None  # [D] each; of every head of the queries and of the keys
    out: "PackedWeight"  # H D -> hidden
    post_norm: Tensor  # [hidden]; before the feed-forward layer
    gate_up: "PackedWeight"  # hidden -> intermediate, gated
    down: "PackedWeight"  # intermediate -> hidden
    eps: float  # of all norms
    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # D
    prepared: dict[str, Any] = field(default_factory=dict)  # what a backend made of the layer, by its name

    @property
    def scale(self) -> float:
        """Factor on the scores of attention."""
        return float(self.head_dim**-0.5)


def compose(  # noqa: PLR0913 - the contract's signature, and the backend
    ops: "Ops",
    residual: Tensor,
    update: Tensor | None,
    layer: LayerWeights,
    angles: tuple[Tensor, Tensor],
    batch: StepBatch,
    cache: tuple[Tensor, Tensor],
) -> Tensor:
    """`Ops.decoder_layer` by the other operations of a backend."""
    if update is None:
        x = ops.rms_norm(residual, layer.input_norm, layer.eps)
    else:
        x = ops.add_rms_norm(update, residual, layer.input_norm, layer.eps)
    num_tokens = len(x)
    heads = ops.linear(x, layer.qkv).view(num_tokens, -1, layer.head_dim)
    q, k, v = torch.split(heads, [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads], dim=1)
    if layer.head_norms is not None:
        q_norm, k_norm = layer.head_norms
        q = ops.rms_norm(q.reshape(-1, layer.head_dim), q_norm, layer.eps).view(q.shape)
        k = ops.rms_norm(k.reshape(-1, layer.head_dim), k_norm, layer.eps).view(k.shape)
    q = ops.rope_cache(q, k, v, *angles, batch.positions, *cache, batch.slot_mapping)
    mixed = ops.paged_attention(q, *cache, batch, layer.scale)
    update = ops.linear(mixed.reshape(num_tokens, -1), layer.out)
    x = ops.add_rms_norm(update, residual, layer.post_norm, layer.eps)
    return ops.linear(ops.linear(x, layer.gate_up), layer.down)
