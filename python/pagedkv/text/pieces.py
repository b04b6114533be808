"""How one token turns into bytes, for the two decoders that Llama-family tokenizers have.

With a byte-level decoder every token is a run of bytes; with byte fallback a token is text, or one byte
written as `<0x0A>`. In both the text of a sequence is the concatenation of its tokens' bytes read as UTF-8,
which is what makes streaming exact and cheap. Other decoders look at a token's neighbours; for them
`piece_rules` returns None and the detokenizer asks the decoder itself.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves; the other 68 bytes take the code points from 256 on, in
    order. The table comes from GPT-2's tokenizer and is shared by every byte-level BPE since.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in alphabet)
    alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return alphabet


_ALPHABET = byte_alphabet()


@dataclass(frozen=True)
class PieceRules:
    """The rules by which a token's string becomes bytes.

    Attributes:
        byte_level: True if the token is spelled in the byte alphabet, False for text with byte fallback.
        space: the character that stands for a space where `byte_level` is False.
        num_stripped: how many leading spaces the decoder takes off the start of a whole text (0 or 1 in
            practice).
    """

    byte_level: bool
    space: str = "▁"
    num_stripped: int = 0

    def piece_bytes(self, token: str) -> bytes:
        """The bytes that `token`, a string of the vocabulary, adds to a text."""
        if self.byte_level:
            try:
                return bytes([_ALPHABET[char] for char in token])
            except KeyError:
                # An added token may hold characters outside the alphabet, e.g. a space; it then means itself.
                return token.encode()
        match = BYTE_TOKEN.fullmatch(token)
        if match:
            return bytes.fromhex(match[1])
        return token.replace(self.space, " ").encode()


def piece_rules(backend: tokenizers.Tokenizer) -> PieceRules | None:
    """The rules that equal the backend's decoder, or None if no such rules exist."""
    if backend.decoder is None:
        return None
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    if decoder["type"] == "ByteLevel":
        return PieceRules(byte_level=True)
    if decoder["type"] != "Sequence":
        return None
    steps: list[dict[str, Any]] = decoder["decoders"]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return PieceRules(byte_level=True)
    kinds = [step["type"] for step in steps]
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
        return None
    space = steps[0]["pattern"].get("String")
    if steps[0]["content"] != " " or not space:
        return None
    num_stripped = 0
    if kinds[3:]:
        if steps[3]["content"] != " " or steps[3]["stop"] != 0:
            return None
        num_stripped = steps[3]["start"]
    return PieceRules(byte_level=False, space=space, num_stripped=num_stripped)
