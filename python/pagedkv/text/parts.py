"""What every loader of a tokenizer hands over: the backend, the special tokens, the templates.

`hf_tokenizer` and `gguf_tokenizer` build it, `Tokenizer` is built from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True)
class TokenizerParts:
    """The result of loading a tokenizer.

    Attributes:
        name: the model's name, for messages.
        backend: text to ids and back, with the post-processor that adds BOS and EOS.
        special_tokens: named special tokens as chat templates see them, e.g. {"bos_token": "<s>"}.
        eos_token_ids: ids that end a sequence according to the tokenizer's files.
        chat_templates: Jinja sources by name; the usual one is called "default".
        template_place: where a chat template would have been found, for the message when there is none.
    """

    name: str
    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    chat_templates: dict[str, str] = field(default_factory=dict)
    template_place: str = "chat_template.jinja or `chat_template` in tokenizer_config.json"
