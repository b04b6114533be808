"""Text to token ids and back, and conversations to prompts, for whatever files the model came in.

`Tokenizer.load` takes a resolved model; everything else is the same for all sources. Thread-safe: nothing
changes after loading but caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .chat_template import ChatTemplates, Message
from .detokenizer import Detokenizer
from .errors import TextError
from .parts import TokenizerParts
from .pieces import piece_rules
from .token_bound import TokenBound, token_bound

if TYPE_CHECKING:
    import tokenizers


# Texts below this length are not worth a bound on their tokens; they are encoded in a millisecond.
_FEW_CHARS = 4096


class TextSource(Protocol):
    """What loading needs to know of a resolved model; `pagedkv.models.ModelSource` is one."""

    @property
    def path(self) -> Path:
        """The directory or file."""

    @property
    def kind(self) -> str:
        """`gguf` for a GGUF file; anything else is a Hugging Face directory."""

    @property
    def name(self) -> str:
        """The model's name."""

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The JSON object in a file of the directory; None where there is no such file."""


class Tokenizer:
    """The tokenizer of one model.

    Attributes:
        name: the model's name.
        backend: the `tokenizers.Tokenizer` underneath.
        piece_rules: how single tokens turn into bytes, or None if the decoder has no such rules.
        special_tokens: named special tokens, e.g. {"bos_token": "<s>"}, as chat templates see them.
        special_ids: ids of all special tokens, which are left out of texts.
        eos_token_ids: ids that end a sequence according to the tokenizer's files.
        vocab_size: the highest id plus one, added tokens included. A model may have more rows than that.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self.name = parts.name
        self.backend: tokenizers.Tokenizer = parts.backend
        self.piece_rules = piece_rules(parts.backend)
        self.special_tokens = dict(parts.special_tokens)
        self.eos_token_ids = parts.eos_token_ids
        added = parts.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max([parts.backend.get_vocab_size(with_added_tokens=False) - 1, *added]) + 1
        missing = f"the model {parts.name!r} has no chat template: there is no {parts.template_place}"
        self.chat_templates = ChatTemplates(parts.chat_templates, parts.special_tokens, missing)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, source: TextSource) -> Tokenizer:
        """Loads the tokenizer of a resolved model. Raises ModelError if its files do not make one."""
        if source.kind == "gguf":
            from .gguf_tokenizer import load_gguf_tokenizer

            return cls(load_gguf_tokenizer(Path(source.path), source.name))
        from .hf_tokenizer import load_hf_tokenizer

        return cls(load_hf_tokenizer(source))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with BOS and EOS where the model's tokenizer adds them.

        Raises:
            TextError: the text holds a lone surrogate, which no encoding can express.
        """
        try:
            # Unlike `encode`, which computes offsets as well, this lets other threads run meanwhile.
            encoded = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoded[0].ids
        except (UnicodeEncodeError, TypeError) as error:
            surrogate = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
            if surrogate is None:
                raise
            raise TextError(
                f"the text has a lone surrogate (U+{ord(text[surrogate]):04X}) at character {surrogate}, "
                "which is not valid Unicode"
            ) from error
        return ids

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `encode` certainly gives or exceeds, from the length of the text alone."""
        if len(text) < _FEW_CHARS or self._token_bound is None:
            return 0
        return self._token_bound.fewest_tokens(text)

    @cached_property
    def _token_bound(self) -> TokenBound | None:
        return token_bound(self.backend, self.piece_rules)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; ids outside the vocabulary leave nothing.

        Equals what transformers decodes but for byte-fallback tokens that are not valid UTF-8: there only the
        broken part of a run of byte tokens becomes U+FFFD, not the characters before it.
        """
        detokenizer = Detokenizer(self, skip_special_tokens)
        return detokenizer.add(token_ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; nothing for an id outside the vocabulary."""
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        token = self.backend.id_to_token(token_id) if self._may_be_id(token_id) else None
        if token is None:
            return b""
        if self.piece_rules is not None:
            value = self.piece_rules.piece_bytes(token)
        else:
            value = self.backend.decode([token_id], skip_special_tokens=False).encode()
        self._bytes[token_id] = value
        return value

    def token(self, token_id: int) -> str:
        """A token's own text, special tokens too, with U+FFFD where it is only part of a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def has_token(self, token_id: int) -> bool:
        """True if the id is in the vocabulary."""
        return self._may_be_id(token_id) and self.backend.id_to_token(token_id) is not None

    def token_id(self, token: str) -> int | None:
        """The id of a token by its string in the vocabulary, e.g. `<|im_end|>`, or None."""
        token_id: int | None = self.backend.token_to_id(token)
        return token_id

    def chat_text(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt's text for a conversation; see `ChatTemplates.render`. Raises ChatTemplateError."""
        return self.chat_templates.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=template_kwargs,
        )

    def chat_prompt(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """The prompt's token ids for a conversation.

        A template writes BOS itself where the model wants it, so none is added here. Raises ChatTemplateError
        or TextError.
        """
        text = self.chat_text(
            messages, add_generation_prompt, continue_final_message, tools, **template_kwargs
        )
        return self.encode(text, add_special_tokens=False)

    @staticmethod
    def _may_be_id(token_id: int) -> bool:
        # The backend takes unsigned 32-bit ids and raises OverflowError for others.
        return 0 <= token_id < 1 << 32
