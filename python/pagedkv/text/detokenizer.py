"""Token ids to text, a few at a time, at constant cost per token.

The texts that a `Detokenizer` returns, one after another, equal the text of all tokens at once. A character
whose bytes are spread over several tokens appears when its last byte is there, never as U+FFFD before. Bytes
that can no longer become a character appear as U+FFFD, one for every maximal broken part, as Unicode
recommends.

Used by `SequenceText` for every sequence that is streamed, and by `Tokenizer.decode`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
# The window method decodes this many tokens of context again. Decoders that look at neighbours look at one.
_CONTEXT_LEN = 4
# An incomplete character has at most three bytes, so a longer run of broken tokens is not going to become
# one.
_MAX_PENDING_LEN = 8


class _Stream(Protocol):
    def add(self, token_ids: Iterable[int]) -> str: ...
    def num_cut_short(self, token_id: int) -> int: ...
    def flush(self) -> str: ...


class Detokenizer:
    """The text of one growing sequence."""

    __slots__ = ("_stream",)

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, at_start: bool = True
    ) -> None:
        """Starts an empty text.

        Args:
            tokenizer: gives the tokens' bytes.
            skip_special_tokens: leaves special tokens out of the text.
            at_start: False if the text goes on from one before it. A sentencepiece tokenizer then keeps the
                space before the first word, which it takes off at the start of a text.
        """
        if tokenizer.piece_rules is not None:
            num_stripped = tokenizer.piece_rules.num_stripped if at_start else 0
            self._stream: _Stream = _ByteStream(tokenizer, skip_special_tokens, num_stripped)
        else:
            self._stream = _WindowStream(tokenizer, skip_special_tokens)

    def add(self, token_ids: Iterable[int]) -> str:
        """Appends tokens and returns the text that is now certain and was not returned before."""
        return self._stream.add(token_ids)

    def num_cut_short(self, token_id: int) -> int:
        """How many U+FFFD the bytes that wait for the rest of their character become if `token_id` is next.

        As many characters of the text that it brings come before its own. Without rules for single tokens
        that is not known, and 0.
        """
        return self._stream.num_cut_short(token_id)

    def flush(self) -> str:
        """Returns what is left, with U+FFFD for a character that was cut short."""
        return self._stream.flush()


class _ByteStream:
    """For tokenizers whose tokens are runs of bytes: concatenates them and reads the result as UTF-8."""

    __slots__ = ("_decoder", "_num_stripped", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, num_stripped: int) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = _Utf8Decoder(errors="replace")
        self._num_stripped = num_stripped

    def add(self, token_ids: Iterable[int]) -> str:
        token_bytes = self._tokenizer.token_bytes
        new = b"".join([token_bytes(token_id) for token_id in token_ids if token_id not in self._skipped])
        return self._strip(self._decoder.decode(new))

    def num_cut_short(self, token_id: int) -> int:
        if token_id in self._skipped or not self._decoder.getstate()[0]:
            return 0
        # A byte of the form 10xxxxxx goes on with a character, any other begins one.
        first = self._tokenizer.token_bytes(token_id)[:1]
        return int(first != b"" and not 0x80 <= first[0] < 0xC0)

    def flush(self) -> str:
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._num_stripped and text:
            if text[0] != " ":
                self._num_stripped = 0
                break
            text = text[1:]
            self._num_stripped -= 1
        return text


class _WindowStream:
    """For any other decoder: decodes a short window of the last tokens with and without the new ones.

    The difference of the two texts is the new text. The window keeps some tokens that were shown already,
    because a decoder may treat the first token of its input in a special way.
    """

    __slots__ = ("_ids", "_num_shown", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._ids: list[int] = []
        self._num_shown = 0

    def add(self, token_ids: Iterable[int]) -> str:
        return "".join([self._add(token_id) for token_id in token_ids])

    def _add(self, token_id: int) -> str:
        # Tokens that leave no trace must not take a place in the window: an empty window has no context.
        if token_id in self._skipped or not self._tokenizer.has_token(token_id):
            return ""
        self._ids.append(token_id)
        if len(self._ids) - self._num_shown < _MAX_PENDING_LEN and self._decode(self._ids).endswith("�"):
            return ""
        return self._advance()

    def num_cut_short(self, token_id: int) -> int:
        return 0

    def flush(self) -> str:
        return self._advance() if len(self._ids) > self._num_shown else ""

    def _advance(self) -> str:
        shown = self._decode(self._ids[: self._num_shown])
        new = self._decode(self._ids)[len(shown) :]
        del self._ids[:-_CONTEXT_LEN]
        self._num_shown = len(self._ids)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.backend.decode(token_ids, skip_special_tokens=False)
