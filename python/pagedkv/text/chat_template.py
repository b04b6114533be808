"""Renders a conversation with the model's Jinja template, as the model was trained to read it.

The environment is the one that chat templates are written for (transformers' documentation, "Chat
templates"): sandboxed, blocks trimmed, loop controls, `raise_exception`, `strftime_now`, a `tojson` that
leaves HTML characters alone, and the `generation` block, which only marks text. Jinja is imported when a
model with a template is loaded.

Used by `Tokenizer.chat_text`; the loaders of tokenizers use `check_template`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pagedkv.errors import ModelError

from .errors import ChatTemplateError

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]

# Appended to the text that is to be continued, to find its end in the rendered prompt. The space shows
# whether the template trims messages. Private-use characters cannot meet with anything that a template looks
# for.
_END_MARK = "\ue000pagedkv-end\ue001 "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Names that no further variable of a template may have: they are arguments of the rendering itself, here or
# in transformers' functions, which these variables are written for.
RESERVED_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def check_template(source: object, place: str) -> str:
    """The source of a template, if it is one.

    A broken template is a fault of the model's, so it shows when the model is loaded, not as a bad request.

    Args:
        source: what the model's files have as a template.
        place: where that stands, for the message.

    Raises:
        ModelError: it is no text, or Jinja cannot read it.
    """
    import jinja2

    if not isinstance(source, str):
        raise ModelError(f"{place}: the chat template is of type {type(source).__name__}, allowed: a text")
    try:
        _environment().compile(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"{place}: the chat template is broken at line {error.lineno}: {error.message}"
        ) from error
    return source


class ChatTemplates:
    """The chat templates of one model, by name. Compiled when first used."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], missing: str) -> None:
        """Keeps the templates.

        Args:
            sources: Jinja sources by name, "default" for the usual one, "tool_use" for prompts with tools.
            special_tokens: variables that every template sees, e.g. bos_token.
            missing: the message of the error when there is no template.
        """
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._missing = missing
        self._compiled: dict[str, jinja2.Template] = {}

    @property
    def names(self) -> list[str]:
        """The names of the templates there are."""
        return sorted(self._sources)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders `messages` to the prompt's text.

        Args:
            messages: the conversation, each with a role and whatever else the template reads. A value of None
                counts as absent.
            add_generation_prompt: ends the prompt with the header of the assistant's next message.
            continue_final_message: leaves the last message open, so that the model goes on writing it.
            tools: JSON schemas of the functions that the model may call.
            variables: further variables of the template, e.g. enable_thinking.

        Raises:
            ChatTemplateError: no template, arguments that contradict each other, or a failure in the
                template.
        """
        name, source = self._choose(tools)
        chat = _normalized(messages)
        values = dict(variables or {})
        if reserved := RESERVED_VARIABLES & values.keys():
            raise ChatTemplateError(
                f"chat template variables: {sorted(reserved)[0]} is set by its own argument"
            )
        if continue_final_message:
            if add_generation_prompt:
                raise ChatTemplateError(
                    "add_generation_prompt and continue_final_message exclude each other: the first begins "
                    "a new message, the second continues the last one"
                )
            continued = _mark_end(chat)
        values = {"documents": None, **self._special_tokens, **values}
        text = self._render(
            name,
            source,
            {**values, "messages": chat, "tools": tools, "add_generation_prompt": add_generation_prompt},
        )
        return _cut_at_mark(text, continued) if continue_final_message else text

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> tuple[str, str]:
        if not self._sources:
            raise ChatTemplateError(self._missing)
        name = "tool_use" if tools is not None and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise ChatTemplateError(
                f"the model has chat templates, but none called default; there are {', '.join(self.names)}"
            )
        return name, self._sources[name]

    def _render(self, name: str, source: str, variables: dict[str, Any]) -> str:
        try:
            if name not in self._compiled:
                self._compiled[name] = _environment().from_string(source)
            return self._compiled[name].render(variables)
        except _Refusal as error:
            raise ChatTemplateError(str(error)) from error
        except Exception as error:
            # A template is a program of the model's author: whatever it trips over is about this
            # conversation.
            kind = type(error).__name__
            raise ChatTemplateError(f"the chat template failed on these messages: {kind}: {error}") from error


class _Refusal(Exception):
    """What `raise_exception` raises inside a template."""


def _raise_exception(message: object) -> None:
    raise _Refusal(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter of this name escapes HTML characters, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> jinja2.Environment:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}` marks what an assistant wrote, for training; here it changes nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _normalized(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies the messages without None values, and with their reasoning under the name templates read."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise ChatTemplateError("messages: expected a list of messages")
    if not messages:
        raise ChatTemplateError("messages: expected at least one message, got an empty list")
    chat = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ChatTemplateError(f"messages[{index}]: expected an object, got {type(message).__name__}")
        copy = {key: value for key, value in message.items() if value is not None}
        reasoning = next((copy[field] for field in _REASONING_FIELDS if field in copy), None)
        if reasoning is not None:
            copy = {"thinking": reasoning, **copy, "reasoning_content": reasoning}
        chat.append(copy)
    return chat


def _mark_end(chat: list[dict[str, Any]]) -> str:
    """Puts the end mark behind the last message's text, in place, and returns that text."""
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _END_MARK
        return content
    if isinstance(content, Sequence):
        parts = [dict(part) if isinstance(part, Mapping) else part for part in content]
        for part in reversed(parts):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                text: str = part["text"]
                part["text"] = text + _END_MARK
                chat[-1]["content"] = parts
                return text
    raise ChatTemplateError("continue_final_message: the last message has no text to continue")


def _cut_at_mark(text: str, continued: str) -> str:
    cut = text.rfind(_END_MARK.rstrip())
    if cut < 0 or continued.strip() not in text[:cut]:
        raise ChatTemplateError("continue_final_message: the chat template drops the last message's text")
    if text.startswith(_END_MARK, cut):
        return text[:cut]
    # The template trims its messages, so the end of this one must be trimmed as well.
    return text[:cut].rstrip()
