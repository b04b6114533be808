"""What goes wrong with text that a client sent: both errors are answered as a bad request.

Faults of the model's own files (no merges, an unknown pre-tokenizer) are `ModelError`s, raised while loading.
"""

from pagedkv.errors import PagedKVError


class TextError(PagedKVError, ValueError):
    """A text cannot be turned into tokens as it is; the message says where and why."""


class ChatTemplateError(PagedKVError, ValueError):
    """A conversation cannot be rendered: no template, a refusal by the template, or a fault inside it.

    A template refuses through `raise_exception(message)`; that message is then the error's whole text.
    """
