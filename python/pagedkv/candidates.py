"""The likeliest next tokens of every beam, for the core to rank. Called after the forward pass."""

import torch
from torch import Tensor


def likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of every row, best first; of equal ones the lowest id.

    Args:
        logits: [B, V], with k at most V.
        k: candidates a row.

    Returns:
        ids i64 [B, k] and their log-probabilities f32 [B, k], of the whole softmax. Those of a row that holds
        NaN, or is infinite at its largest, are NaN.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    # Sorting a whole vocabulary takes ten times as long, but only it says which of equal values are taken.
    best, ids = logprobs.topk(k, dim=-1)
    for row in torch.nonzero((logprobs >= best[:, -1:]).sum(-1) > k).squeeze(1).tolist():
        ranked, order = logprobs[row].sort(descending=True, stable=True)
        best[row], ids[row] = ranked[:k], order[:k]
    ids, order = ids.sort(dim=-1)
    best, order = best.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, order), best
