"""Text on the client's side of the engine: tokenizer, chat template, incremental detokenizer, stop strings.

The engine knows token ids only. `Tokenizer` makes them from prompts and conversations; one `SequenceText` per
generated sequence turns them back into text, token by token, and says when a stop string ended it.
"""

from .detokenizer import Detokenizer
from .errors import ChatTemplateError, TextError
from .stop import StopSearch, StopStrings
from .stream import SequenceText
from .tokenizer import Tokenizer

__all__ = [
    "ChatTemplateError",
    "Detokenizer",
    "SequenceText",
    "StopSearch",
    "StopStrings",
    "TextError",
    "Tokenizer",
]
