"""How many tokens a text has at least, from its length alone, for tokenizers where that can be said.

A text that cannot fit need not be encoded then. Used by `Tokenizer.fewest_tokens`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers.models import BPE

from .pieces import PieceRules, byte_alphabet

if TYPE_CHECKING:
    import tokenizers

# How often a text may shrink, in UTF-8, where characters are composed (Unicode's FAQ on normalization gives
# the factors of the way back).
_NFC_FACTOR = 3
# Bytes that no text in UTF-8 has.
_NOT_UTF8 = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])


@dataclass(frozen=True)
class TokenBound:
    """What bounds the tokens of a text from below.

    Attributes:
        longest: the most bytes that one token can stand for.
        unspelled: bytes that the vocabulary cannot spell. They may leave no token at all.
    """

    longest: int
    unspelled: bytes = b""

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that encoding the text certainly gives or exceeds."""
        return len(text.encode(errors="surrogatepass").translate(None, self.unspelled)) // self.longest


def token_bound(backend: tokenizers.Tokenizer, rules: PieceRules | None) -> TokenBound | None:
    """The bound of a tokenizer; None where one token may stand for a text of any length.

    That is so where a step on the way drops or shortens text (spaces at a special token, a normalizer that
    strips), and where a run of unknown characters becomes one token.
    """
    if rules is None or not isinstance(backend.model, BPE):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    vocabulary = backend.get_vocab()
    unspelled = _unspelled(rules, vocabulary)
    if unspelled and not rules.byte_level:
        return None
    factor = 1
    for step in _steps(backend.normalizer):
        if step["type"] == "NFC" and not unspelled:
            factor *= _NFC_FACTOR
        elif not (step["type"] == "Prepend" or _lengthens(step)):
            return None
    for step in _steps(backend.pre_tokenizer):
        keeps = step["type"] in ("ByteLevel", "Digits", "Metaspace")
        if not (keeps or (step["type"] == "Split" and step["behavior"] != "Removed")):
            return None
    return TokenBound(factor * max(_num_bytes(token, rules) for token in vocabulary), unspelled)


def _unspelled(rules: PieceRules, vocabulary: dict[str, int]) -> bytes:
    """The bytes that have no token of their own, though texts have them."""
    if rules.byte_level:
        spelled = {byte for char, byte in byte_alphabet().items() if char in vocabulary}
    else:
        spelled = {byte for byte in range(256) if f"<0x{byte:02X}>" in vocabulary}
    return bytes(byte for byte in range(256) if byte not in spelled and byte not in _NOT_UTF8)


def _num_bytes(token: str, rules: PieceRules) -> int:
    # Where a space is written as a longer character, a text may hold that character itself.
    return len(rules.piece_bytes(token)) if rules.byte_level else len(token.encode())


def _lengthens(step: dict[str, Any]) -> bool:
    if step["type"] != "Replace" or "String" not in step["pattern"]:
        return False
    return len(step["content"].encode()) >= len(step["pattern"]["String"].encode())


def _steps(component: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, sequences unfolded."""
    return [] if component is None else _unfolded(json.loads(component.__getstate__()))


def _unfolded(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    inner = step.get("normalizers", step.get("pretokenizers", []))
    return [found for one in inner for found in _unfolded(one)]
