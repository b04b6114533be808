"""The noise of sampling: Philox4x32-10, and the Gumbel noise made of it, as all backends must compute it.

Philox is a counter-based generator (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
3", SC 2011): ten rounds of a bijection of the 128-bit counter under a 64-bit key. Nothing is carried from
draw to draw, so a token's noise depends on its seed, sample index, position and id alone: not on the batch,
nor on preemption.

    key      (seed low 32 bits, seed high 32 bits)
    counter  (token_id >> 2, position, sample_index, 0); the noise of token_id is output word token_id & 3
    u        ((word >> 9) + 0.5) * 2^-23, in 0 < u < 1
    g        -ln(-ln(u)), with the logarithm of `pagedkv.ops.exact`

u has 24 significant bits, so that float32 holds it, and its distance from 1, without rounding. With one bit
more the largest words would round to u = 1 and to infinite noise, and such a token would win whatever its
logit.
"""

import torch
from torch import Tensor

from pagedkv.ops.exact import ln

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF
_NUM_ROUNDS = 10


def _multiply(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, in halves so that no int64 overflows."""
    low = a * (constant & 0xFFFF)
    high = a * (constant >> 16)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & _MASK


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds of Philox4x32. All words are int64 tensors holding 0..2^32-1, of shapes that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        high_0, low_0 = _multiply(c0, _MULTIPLIER_0)
        high_1, low_1 = _multiply(c2, _MULTIPLIER_1)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def gumbel_noise(
    seed_low: Tensor, seed_high: Tensor, position: Tensor, sample_index: Tensor, vocab_size: int
) -> Tensor:
    """Noise of every token for every row: four i64 [R] -> f32 [R, vocab_size]."""
    num_counters = (vocab_size + 3) // 4
    first = torch.arange(num_counters, dtype=torch.int64, device=position.device)[None, :]
    words = philox4x32(
        (first, position[:, None], sample_index[:, None], torch.zeros_like(first)),
        (seed_low[:, None], seed_high[:, None]),
    )
    rows = (len(position), num_counters)
    # Four words a counter, one after the other: token ids 4i .. 4i + 3.
    word = torch.stack([w.expand(rows) for w in words], dim=-1).flatten(1)[:, :vocab_size]
    return gumbel_of_word(word)


def gumbel_of_word(word: Tensor) -> Tensor:
    """The noise that a word of Philox, i64 0..2^32-1, stands for, as f32; always finite."""
    u = ((word >> 9).to(torch.float32) + 0.5) * 2.0**-23
    return -ln(-ln(u))
