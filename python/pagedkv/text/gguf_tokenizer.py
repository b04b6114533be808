"""Builds a tokenizer from the metadata of a GGUF file.

A GGUF stores the vocabulary, the merges or scores and the kind of each token, but of the way to cut text into
words only a name, `tokenizer.ggml.pre`. The rules behind the names that this module knows are those of the
`tokenizer.json` that the named models ship. An unknown name is refused: a wrong rule gives plausible tokens
that the model never saw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from pagedkv.errors import ModelError
from pagedkv.gguf_header import end_token_ids, read_metadata

from .chat_template import check_template
from .parts import TokenizerParts

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Pre-tokenizers that cut by a pattern of their own, by name in tokenizer.ggml.pre.
_PATTERNS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "qwen2": _QWEN2, "tekken": _TEKKEN}
_GPT2_NAMES = ("gpt-2", "gpt2", "default", "")
# Vocabularies where a word that is a token is taken whole, even if the merges would not lead to it.
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
_SPACE = "▁"


def load_gguf_tokenizer(path: Path, name: str) -> TokenizerParts:
    """Builds the tokenizer that the GGUF file at `path` describes.

    Raises:
        ModelError: the metadata lacks something or names something unknown.
    """
    return build_gguf_tokenizer(read_metadata(path), name, str(path))


def build_gguf_tokenizer(metadata: dict[str, Any], name: str, where: str) -> TokenizerParts:
    """The same from metadata that was read already; `where` names the file in messages."""
    vocabulary = _Vocabulary(metadata, where)
    model = vocabulary.get("model")
    if model == "gpt2":
        backend = _byte_level(vocabulary)
    elif model == "llama":
        backend = _sentencepiece(vocabulary)
    else:
        raise ModelError(f"{where}: tokenizer.ggml.model {model!r} is not supported; gpt2 and llama are")
    vocabulary.add_special_tokens(backend)
    special_tokens = vocabulary.special_tokens()
    # Without the keys, both kinds behave as the reference implementation of the format does.
    starts_with_bos = model == "llama" or vocabulary.get("pre", "") in _WHOLE_WORDS
    _set_post_processor(
        backend,
        bos=special_tokens.get("bos_token") if vocabulary.get("add_bos_token", starts_with_bos) else None,
        eos=special_tokens.get("eos_token") if vocabulary.get("add_eos_token", False) else None,
    )
    return TokenizerParts(
        name=name,
        backend=backend,
        special_tokens=special_tokens,
        eos_token_ids=end_token_ids(metadata, len(vocabulary.tokens)),
        chat_templates=_chat_templates(metadata, where),
        template_place="tokenizer.chat_template in the GGUF metadata",
    )


class _Vocabulary:
    """The `tokenizer.ggml.*` keys of one file."""

    def __init__(self, metadata: dict[str, Any], where: str) -> None:
        self.where = where
        self._metadata = metadata
        self.tokens: list[str] = self.require("tokens")
        types: list[int] = self.get("token_type") or [1] * len(self.tokens)
        if len(types) != len(self.tokens):
            raise ModelError(
                f"{where}: tokenizer.ggml.token_type has {len(types)} entries for {len(self.tokens)} tokens"
            )
        self.types = types
        # A few files pad with repeated tokens. The first one is the token, the others are never produced.
        self.ids: dict[str, int] = {}
        for token_id, token in enumerate(self.tokens):
            self.ids.setdefault(token, token_id)

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(
                f"{self.where}: the GGUF metadata has no tokenizer.ggml.{key}, so no tokenizer can be built; "
                "convert the model again with a current converter, or use its Hugging Face directory"
            )
        return value

    def token(self, key: str) -> str | None:
        """The token whose id stands under `key`."""
        token_id: int | None = self.get(key)
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens):
            raise ModelError(
                f"{self.where}: tokenizer.ggml.{key} is {token_id}, but there are {len(self.tokens)} tokens"
            )
        return self.tokens[token_id]

    def special_tokens(self) -> dict[str, str]:
        keys = {
            "bos": "bos_token_id",
            "eos": "eos_token_id",
            "unk": "unknown_token_id",
            "pad": "padding_token_id",
        }
        named = {f"{role}_token": self.token(key) for role, key in keys.items()}
        return {role: token for role, token in named.items() if token is not None}

    def add_special_tokens(self, backend: Tokenizer) -> None:
        """Makes control and user-defined tokens match in text as a whole; only the former are special."""
        by_kind: dict[int, list[str]] = {}
        for token, kind in zip(self.tokens, self.types, strict=True):
            by_kind.setdefault(kind, []).append(token)
        control = by_kind.get(_CONTROL, []) + by_kind.get(_UNKNOWN, [])
        control += [token for token in self.special_tokens().values() if token not in control]
        backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
        backend.add_tokens([AddedToken(token, normalized=False) for token in by_kind.get(_USER_DEFINED, [])])


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    pre = vocabulary.get("pre", "")
    splitting: pre_tokenizers.PreTokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=bool(vocabulary.get("add_space_prefix")), use_regex=True
    )
    if pre == "smollm":
        splitting = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), splitting])
    elif pre in _PATTERNS:
        splitting = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_PATTERNS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif pre not in _GPT2_NAMES:
        known = ", ".join(sorted(["smollm", "gpt-2", "default", *_PATTERNS]))
        raise ModelError(
            f"{vocabulary.where}: the pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not supported; "
            f"allowed: {known}"
        )
    merges = [_split_merge(merge, vocabulary.where) for merge in vocabulary.require("merges")]
    try:
        model = BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=pre in _WHOLE_WORDS)
    except Exception as error:
        raise ModelError(
            f"{vocabulary.where}: tokenizer.ggml.merges do not fit the tokens: {error}"
        ) from error
    backend = Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = splitting
    backend.decoder = decoders.ByteLevel()
    return backend


def _split_merge(merge: str, where: str) -> tuple[str, str]:
    # The search starts behind the first character, so that a token that begins with a space is not cut in
    # two.
    cut = merge.find(" ", 1)
    if cut < 0:
        raise ModelError(
            f"{where}: tokenizer.ggml.merges holds {merge!r}, which is not two tokens and a space"
        )
    return merge[:cut], merge[cut + 1 :]


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """A sentencepiece BPE: spaces are `▁`, characters outside the vocabulary become byte tokens."""
    if vocabulary.get("merges"):
        merges = [_split_merge(merge, vocabulary.where) for merge in vocabulary.get("merges")]
    else:
        merges = merges_from_scores(vocabulary.ids, vocabulary.require("scores"))
    backend = Tokenizer(
        BPE(
            vocab=vocabulary.ids,
            merges=merges,
            unk_token=vocabulary.token("unknown_token_id"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.get("add_space_prefix", True):
        # Every stretch of text between two special tokens gets its space, as sentencepiece gives it to a
        # line.
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(content=" ", left=1))
    else:
        backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return backend


def merges_from_scores(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that make BPE join pieces in the order of their scores, as sentencepiece does.

    Sentencepiece joins the neighbours whose union has the best score. Every way to cut a piece into two
    pieces is a merge of that score; of several, the one of older (smaller) ids first.
    """
    ranked = []
    for token, token_id in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[token_id], token_id, left, right, cut, token))
    ranked.sort()
    return [(token[:cut], token[cut:]) for *_, cut, token in ranked]


def _set_post_processor(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    added = [token for token in (bos, eos) if token is not None]
    if added:
        template = [*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])]
        special = [(token, backend.token_to_id(token)) for token in dict.fromkeys(added)]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)


def _chat_templates(metadata: dict[str, Any], where: str) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {}
    for key, value in metadata.items():
        if key == prefix or key.startswith(prefix + "."):
            templates[key[len(prefix) + 1 :] or "default"] = check_template(value, f"{where}: {key}")
    return templates
