"""What is known about request fields that the server does not act on.

Three kinds. A field that would change the answer and is not supported is refused by name, unless its value
asks for nothing (`frequency_penalty: 0`). A field that cannot change the answer of a model that is supported
is accepted silently. Whatever is left is unknown: it is ignored, logged once and named in a response header,
or refused where the server runs with `--strict`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pagedkv.serve.errors import refuse, shown


@dataclass(frozen=True)
class Unsupported:
    """A field whose effect does not exist here.

    Attributes:
        is_neutral: whether a value asks for nothing, so that ignoring it is honest.
        allowed: the neutral values in words.
        hint: what to do instead, if there is something.
    """

    is_neutral: Callable[[Any], bool]
    allowed: str
    hint: str = ""


def _only(*values: Any) -> Unsupported:
    """Neutral are exactly these values; a number is not a boolean and not a string, but 0 is 0.0."""

    def is_neutral(value: Any) -> bool:
        return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)

    return Unsupported(is_neutral, " or ".join(shown(v) for v in values))


def _never(hint: str = "") -> Unsupported:
    return Unsupported(lambda _value: False, "", hint)


def _text_format(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") == "text"


UNSUPPORTED: Mapping[str, Unsupported] = {
    "add_special_tokens": _only(
        False
    ),  # for chat: the template writes the special tokens; completions implement it
    "allowed_token_ids": _only([]),
    "audio": _never(),
    "background": _only(False),
    "bad_words": _only([]),
    "chat_template": _never("The model's own template is used."),
    "conversation": _never(),
    "documents": _only([]),
    "echo": _only(False),
    "frequency_penalty": _only(0),
    "function_call": _only("none", "auto"),
    "functions": _only([]),
    "kv_transfer_params": _never(),
    "logit_bias": _only({}),
    "logits_processors": _only([]),
    "lora_path": _never(),
    "min_tokens": _only(0),
    "mm_processor_kwargs": _only({}),
    "modalities": _only(["text"]),
    "presence_penalty": _only(0),
    "previous_response_id": _never(),
    "prompt_embeds": _never(),
    "prompt_logprobs": _never(),
    "repetition_penalty": _only(1),
    "response_format": Unsupported(_text_format, '{"type": "text"}'),
    "return_token_ids": _only(False),
    "return_tokens_as_token_ids": _only(False),
    "spaces_between_special_tokens": _only(True),
    "structured_outputs": _never(),
    "suffix": _only(""),
    "tools": _only([]),
    "truncate_prompt_tokens": _never(),
    "web_search_options": _never(),
}

# Every name that begins so belongs to a constraint on the output.
_UNSUPPORTED_PREFIX = "guided_"

NO_OP = frozenset(
    {
        "enable_thinking",
        "include",
        "include_reasoning",
        "metadata",
        "moderation",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",
        "reasoning_effort",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_interval",
        "thinking",
        "truncation",
        "user",
        "verbosity",
    }
)


def refuse_unsupported(body: Mapping[str, Any], implemented: Iterable[str]) -> None:
    """Refuses the first field of `body` that asks for something that does not exist yet.

    `body` holds no null values. `implemented` are the fields that the endpoint acts on: they are left to it.
    """
    implemented = frozenset(implemented)
    for name, value in body.items():
        if name in implemented:
            continue
        rule = UNSUPPORTED.get(name)
        if rule is None and name.startswith(_UNSUPPORTED_PREFIX):
            rule = _never()
        if rule is None or rule.is_neutral(value):
            continue
        allowed = f"only {rule.allowed} is accepted" if rule.allowed else "leave it out"
        message = f"{name} is not supported yet: {allowed}, got {shown(value)}."
        refuse(name, f"{message} {rule.hint}".strip(), code="unsupported_parameter")
    _refuse_tool_choice(body, implemented)


def _refuse_tool_choice(body: Mapping[str, Any], implemented: frozenset[str]) -> None:
    """Without tools, "none" and "auto" ask for nothing and every other choice cannot be met."""
    choice = body.get("tool_choice")
    if "tool_choice" in implemented or choice in (None, "none", "auto"):
        return
    message = f'tool_choice must be "none" or "auto" where no tools are given, got {shown(choice)}.'
    refuse("tool_choice", message, code="unsupported_parameter")


def unknown_fields(body: Mapping[str, Any], implemented: Iterable[str]) -> list[str]:
    """Names of the fields of `body` that nobody here has heard of, sorted."""
    known = NO_OP | UNSUPPORTED.keys() | {"tool_choice"} | set(implemented)
    return sorted(name for name in body if name not in known and not name.startswith(_UNSUPPORTED_PREFIX))
