"""Loads the tokenizer of a Hugging Face directory.

`tokenizer.json` holds all that is needed to tokenize, so it is read with the `tokenizers` package alone:
importing transformers' tokenizers takes seconds. Special tokens and templates come from the files beside it,
by the rules that transformers' `AutoTokenizer` applies. A directory without `tokenizer.json` is converted by
`AutoTokenizer`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from pagedkv.errors import ModelError

from .chat_template import check_template
from .parts import TokenizerParts

if TYPE_CHECKING:
    from .tokenizer import TextSource

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_hf_tokenizer(source: TextSource) -> TokenizerParts:
    """Loads the tokenizer in the directory of a model.

    Raises:
        ModelError: no tokenizer files, or files that cannot be read.
    """
    path, name = Path(source.path), source.name
    if not (path / "tokenizer.json").is_file():
        return _converted(path, name)
    try:
        backend = Tokenizer.from_file(str(path / "tokenizer.json"))
    except Exception as error:
        raise ModelError(f"{path / 'tokenizer.json'}: cannot be read as a tokenizer: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    config = source.read_json("tokenizer_config.json") or {}
    if "added_tokens_decoder" not in config:
        # Older checkpoints keep their special tokens in a file of their own.
        config |= source.read_json("special_tokens_map.json") or {}
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    named = {role: config[role] for role in _NAMED_TOKENS if config.get(role)} | _model_tokens(config)
    special_tokens = {role: _content(token) for role, token in named.items()}
    _add_missing_tokens(backend, config, list(named.values()))
    eos_id = backend.token_to_id(special_tokens.get("eos_token", ""))
    return TokenizerParts(
        name=name,
        backend=backend,
        special_tokens=special_tokens,
        eos_token_ids=() if eos_id is None else (eos_id,),
        chat_templates=_chat_templates(path, config.get("chat_template")),
    )


def _content(token: str | dict[str, Any]) -> str:
    """A token is written as a string, or as an object with its content and how it matches."""
    return token if isinstance(token, str) else str(token["content"])


def _added_token(token: str | dict[str, Any]) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    fields = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(**{"special": True, **{key: token[key] for key in fields if key in token}})


def _model_tokens(config: dict[str, Any]) -> dict[str, Any]:
    """Special tokens under names of the model's own, e.g. image_token. Templates see them as the others."""
    extra = config.get("extra_special_tokens")
    own = {
        key: value
        for key, value in config.items()
        if key.endswith("_token") and key not in _NAMED_TOKENS and isinstance(value, str)
    }
    return own | (extra if isinstance(extra, dict) else {})


def _add_missing_tokens(backend: Tokenizer, config: dict[str, Any], named: list[Any]) -> None:
    """Adds what tokenizer_config.json declares beyond tokenizer.json, or declares differently."""
    added = list(backend.get_added_tokens_decoder().values())
    present = {repr(token) for token in added}
    declared = config.get("added_tokens_decoder", {})
    tokens = [_added_token(declared[key]) for key in sorted(declared, key=int)]
    new = [token for token in tokens if repr(token) not in present]
    names = {token.content for token in [*added, *tokens]}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    for token in [*named, *([] if isinstance(extra, dict) else extra)]:
        if _content(token) not in names:
            names.add(_content(token))
            new.append(_added_token(token))
    backend.add_tokens(new)


def _chat_templates(path: Path, configured: Any) -> dict[str, str]:
    """Template files come before what tokenizer_config.json holds."""
    templates = {file.stem: _template_in(file) for file in path.glob("additional_chat_templates/*.jinja")}
    if (path / "chat_template.jinja").is_file():
        templates["default"] = _template_in(path / "chat_template.jinja")
    if templates or not configured:
        return templates
    if isinstance(configured, list):
        named = {entry["name"]: entry["template"] for entry in configured}
    else:
        named = configured if isinstance(configured, dict) else {"default": configured}
    place = f"{path / 'tokenizer_config.json'}: chat_template"
    return {name: check_template(source, place) for name, source in named.items()}


def _template_in(file: Path) -> str:
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: the chat template cannot be read as UTF-8: {error}") from error
    return check_template(source, str(file))


def _converted(path: Path, name: str) -> TokenizerParts:
    from transformers import AutoTokenizer

    try:
        loaded = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        raise ModelError(
            f"{path}: there is no tokenizer.json, and other files cannot be converted to one: {error}"
        ) from error
    if not loaded.is_fast:
        raise ModelError(f"{path}: the tokenizer {type(loaded).__name__} has no tokenizer.json form")
    template = loaded.chat_template or {}
    named = template if isinstance(template, dict) else {"default": template}
    return TokenizerParts(
        name=name,
        backend=loaded.backend_tokenizer,
        special_tokens=dict(loaded.special_tokens_map),
        eos_token_ids=() if loaded.eos_token_id is None else (loaded.eos_token_id,),
        chat_templates={name: check_template(source, str(path)) for name, source in named.items()},
    )
