"""The forward pass of the Llama family: what it is made of, and what it computes, operation by operation.

`pagedkv.models.llama` packs a `DecoderWeights` when a model is loaded and hands it to `Ops.forward` in every
step. A backend that has no kernel for a whole forward pass composes its own operations with `compose`; for
one that has, this says what is right.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pagedkv._core import Heartbeat
from pagedkv.batch import StepBatch

if TYPE_CHECKING:
    from pagedkv.ops import Ops, PackedWeight


@dataclass(frozen=True)
class LayerWeights:
    """The weights of a layer, packed by the backend that is to compute it."""

    input_norm: Tensor  # [hidden]; before attention
    qkv: "PackedWeight"  # hidden -> (H + 2 G) D: queries, keys, values
    head_norms: tuple[Tensor, Tensor] | None  # [D] each; of every head of the queries and of the keys
    out: "PackedWeight"  # H D -> hidden
    post_norm: Tensor  # [hidden]; before the feed-forward layer
    gate_up: "PackedWeight"  # hidden -> intermediate, gated
    down: "PackedWeight"  # intermediate -> hidden


@dataclass(frozen=True)
class DecoderWeights:
    """A model, packed by the backend that is to compute it. H query heads, G key/value heads, D head_dim."""

    embedding: Tensor | None  # [V, hidden]; None: the weight of the output layer
    layers: Sequence[LayerWeights]
    norm: Tensor  # [hidden]; before the output layer
    head: "PackedWeight"  # hidden -> V: the output layer
    eps: float  # of all norms
    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # D
    prepared: dict[str, Any] = field(default_factory=dict)  # what a backend made of the model, by its name

    @property
    def scale(self) -> float:
        """Factor on the scores of attention."""
        return float(self.head_dim**-0.5)


def compose(
    ops: "Ops",
    model: DecoderWeights,
    batch: StepBatch,
    angles: tuple[Tensor, Tensor],
    kv_caches: Sequence[tuple[Tensor, Tensor]],
    heartbeat: Heartbeat | None = None,
) -> Tensor:
    """`Ops.forward` by the other operations of a backend."""
    if model.embedding is None:
        residual = ops.embedding(batch.token_ids, model.head)
    else:
        residual = torch.nn.functional.embedding(batch.token_ids, model.embedding)
    update = None
    for layer, cache in zip(model.layers, kv_caches, strict=True):
        if heartbeat is not None:
            heartbeat.beat()
        # What a layer contributes is added together with the norm that reads the sum.
        if update is None:
            x = ops.rms_norm(residual, layer.input_norm, model.eps)
        else:
            x = ops.add_rms_norm(update, residual, layer.input_norm, model.eps)
        update = _attend(ops, x, model, layer, batch, angles, cache)
        x = ops.add_rms_norm(update, residual, layer.post_norm, model.eps)
        update = ops.linear(ops.linear(x, layer.gate_up), layer.down)
    assert update is not None, "a model has layers"
    # The norm works row by row, so the rows nobody samples need not go through it.
    update, residual = update[batch.sample_rows], residual[batch.sample_rows]
    return ops.linear(ops.add_rms_norm(update, residual, model.norm, model.eps), model.head, torch.float32)


def _attend(
    ops: "Ops",
    x: Tensor,
    model: DecoderWeights,
    layer: LayerWeights,
    batch: StepBatch,
    angles: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
) -> Tensor:
    """Grouped-query attention through the paged cache: [T, hidden] -> [T, hidden]."""
    num_tokens = len(x)
    heads = ops.linear(x, layer.qkv).view(num_tokens, -1, model.head_dim)
    q, k, v = torch.split(heads, [model.num_heads, model.num_kv_heads, model.num_kv_heads], dim=1)
    if layer.head_norms is not None:
        q_norm, k_norm = layer.head_norms
        q = ops.rms_norm(q.reshape(-1, model.head_dim), q_norm, model.eps).view(q.shape)
        k = ops.rms_norm(k.reshape(-1, model.head_dim), k_norm, model.eps).view(k.shape)
    q = ops.rope_cache(q, k, v, *angles, batch.positions, *cache, batch.slot_mapping)
    mixed = ops.paged_attention(q, *cache, batch, model.scale)
    return ops.linear(mixed.reshape(num_tokens, -1), layer.out)
