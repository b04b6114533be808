"""Chat templates render as transformers renders them, and what goes wrong in them is the client's to read."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import tiny_tokenizers as tiny
from pagedkv.errors import ModelError, PagedKVError
from pagedkv.text import ChatTemplateError, Tokenizer

USER = {"role": "user", "content": 'Is <b>1 < 2</b> & "true"?'}
CHAT = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "  Yes.\n"},
    {"role": "user", "content": "the end"},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"a": ["<x>", 1, None, True]}}}]

LLAMA3 = """{{- bos_token }}
{%- for message in messages %}
    {{- '<|start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n\\n' }}
{%- endif %}
"""
LOOPS = """
{% set ns = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% set ns.count = ns.count + 1 %}
    {% if ns.count > 2 %}{% break %}{% endif %}
{{ loop.index }}: {{ message.content }}
{% endfor %}
count={{ ns.count }} {{ unknown_token }}|{{ eos_token }}
"""
GENERATION = """
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{% generation %}
{% set seen = 'inside' %}
{{ message.content }}{{ seen }}
{% endgeneration %}
{% else %}
{{ message.content }}{{ seen }}
{% endif %}
{% endfor %}
"""
TOOL_LIST = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{{ tool | tojson(indent=2) }}{% endfor %}"
    "{% else %}no tools{% endif %}{{ messages[-1] | tojson }}{{ documents is none }}"
)
FIELDS = "{% for m in messages %}{% for k, v in m | dictsort %}{{ k }}={{ v }};{% endfor %}\n{% endfor %}"


def load(path: Path, **config: Any) -> tuple[Tokenizer, Any]:
    """The tokenizer with the settings, and transformers' own."""
    source = tiny.save_directory(path, tiny.with_bos(tiny.byte_level()), config)
    return Tokenizer.load(source), AutoTokenizer.from_pretrained(str(path))


def with_template(template: str) -> Tokenizer:
    return tiny.paged(
        tiny.with_bos(tiny.byte_level()),
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        chat_templates={"default": template},
    )


@pytest.mark.parametrize("template", [tiny.CHATML, LLAMA3, LOOPS, GENERATION, TOOL_LIST, FIELDS])
@pytest.mark.parametrize(
    "arguments",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "tools": TOOLS},
        {"add_generation_prompt": True, "unknown_token": "given", "eos_token": "other"},
    ],
)
def test_equals_transformers(template: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    tokenizer, reference = load(tmp_path, chat_template=template)
    assert tokenizer.chat_text(CHAT, **arguments) == reference.apply_chat_template(
        CHAT, tokenize=False, **arguments
    )
    ids = reference.apply_chat_template(CHAT, return_dict=False, **arguments)
    assert tokenizer.chat_prompt(CHAT, **arguments) == ids


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "name": "x"},
        {"role": "assistant", "content": "a", "reasoning": "b"},
        {"role": "assistant", "content": "a", "thinking": "b", "tool_calls": None},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}], "reasoning_content": "b"},
    ],
)
def test_messages_are_prepared_as_in_transformers(message: dict[str, Any], tmp_path: Path) -> None:
    tokenizer, reference = load(tmp_path, chat_template=FIELDS)
    before = json.dumps(message)
    assert tokenizer.chat_text([message], add_generation_prompt=False) == reference.apply_chat_template(
        [message], tokenize=False
    )
    assert json.dumps(message) == before


@pytest.mark.parametrize("template", [tiny.CHATML, LLAMA3])
@pytest.mark.parametrize(
    "content", ["the answer is", "the answer is \n", " ", [{"type": "text", "text": "The "}]]
)
def test_the_last_message_can_be_continued(template: str, content: Any, tmp_path: Path) -> None:
    if isinstance(content, list):
        template = template.replace("message['content']", "message['content'][0]['text']")
    tokenizer, reference = load(tmp_path, chat_template=template)
    chat = [{"role": "assistant", "content": content}]
    text = tokenizer.chat_text(chat, add_generation_prompt=False, continue_final_message=True)
    assert text == reference.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert "<|end|>" not in text


def test_bos_is_there_once(tmp_path: Path) -> None:
    tokenizer, _ = load(tmp_path, chat_template=LLAMA3)
    assert tokenizer.token_id("<s>") == 0
    assert tokenizer.chat_prompt([USER]).count(0) == 1
    assert tokenizer.encode("a completion").count(0) == 1


def test_templates_by_name_and_in_files(tmp_path: Path) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }}"},
    ]
    tokenizer, reference = load(tmp_path, chat_template=named)
    for tools in (None, TOOLS):
        text = tokenizer.chat_text([USER], tools=tools)
        assert text == reference.apply_chat_template([USER], tools=tools, tokenize=False)

    (tmp_path / "chat_template.jinja").write_text("from a file {{ messages[0].role }}")
    tokenizer = Tokenizer.load(tiny.directory(tmp_path))
    assert tokenizer.chat_templates.names == ["default"]
    assert tokenizer.chat_text([USER], tools=TOOLS) == "from a file user"

    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    tokenizer = Tokenizer.load(tiny.directory(tmp_path))
    reference = AutoTokenizer.from_pretrained(str(tmp_path))
    for tools in (None, TOOLS):
        text = tokenizer.chat_text([USER], tools=tools)
        assert text == reference.apply_chat_template([USER], tools=tools, tokenize=False)


def test_the_date_is_todays() -> None:
    from datetime import datetime

    text = with_template("{{ strftime_now('%d %b %Y') }}").chat_text([USER])
    assert datetime.strptime(text, "%d %b %Y").year >= 2024


def test_a_missing_template_is_named(tmp_path: Path) -> None:
    tokenizer, _ = load(tmp_path)
    assert tokenizer.chat_templates.names == []
    with pytest.raises(
        ChatTemplateError, match=r"'tiny' has no chat template: there is no chat_template\.jinja or"
    ):
        tokenizer.chat_prompt([USER])
    keys = tiny.byte_level_keys(tiny.byte_level())
    tokenizer = Tokenizer.load(tiny.save_gguf(tmp_path / "m.gguf", "gpt2", pre="gpt-2", **keys))
    with pytest.raises(ChatTemplateError, match=r"no tokenizer\.chat_template in the GGUF metadata"):
        tokenizer.chat_prompt([USER])
    tokenizer, _ = load(tmp_path / "named", chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(ChatTemplateError, match="none called default; there are rag"):
        tokenizer.chat_prompt([USER])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("a\n{% for x in %}", "broken at line 2"),
        ("{{ messages[0].content | nofilter }}", "broken at line 1: No filter named 'nofilter'"),
    ],
)
def test_broken_templates_are_faults_of_the_model(template: str, message: str, tmp_path: Path) -> None:
    config = {"chat_template": template}
    source = tiny.save_directory(tmp_path, tiny.with_bos(tiny.byte_level()), config)
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json: chat_template: .* {message}"):
        Tokenizer.load(source)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match=rf"chat_template\.jinja: .* {message}"):
        Tokenizer.load(source)
    keys = tiny.byte_level_keys(tiny.byte_level()) | {"tokenizer.chat_template": template}
    source = tiny.save_gguf(tmp_path / "m.gguf", "gpt2", pre="gpt-2", **keys)
    with pytest.raises(ModelError, match=rf"m\.gguf: tokenizer\.chat_template: .* {message}"):
        Tokenizer.load(source)


def test_templates_that_are_no_text_are_named(tmp_path: Path) -> None:
    source = tiny.save_directory(tmp_path, tiny.with_bos(tiny.byte_level()), {"chat_template": 5})
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: .* is of type int, allowed: a text"):
        Tokenizer.load(source)
    (tmp_path / "chat_template.jinja").write_bytes(b"gr\xfc\xdfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: .* cannot be read as UTF-8"):
        Tokenizer.load(source)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('Roles must alternate.') }}", r"^Roles must alternate\.$"),
        ("{{ messages[0].nothing.more }}", "failed on these messages: UndefinedError: .*nothing"),
        ("{{ 'a' + messages[0].number }}", "failed on these messages: TypeError"),
        ("{{ messages.append(1) }}", "failed on these messages: SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "failed on these messages: SecurityError"),
    ],
)
def test_faults_in_templates_are_bad_requests(template: str, message: str) -> None:
    tokenizer = with_template(template)
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match=message) as caught:
            tokenizer.chat_prompt([{"role": "user", "content": "a", "number": 1}])
        assert isinstance(caught.value, PagedKVError)
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("messages", "arguments", "message"),
    [
        ([], {}, "messages: expected at least one message"),
        ("Hi", {}, "messages: expected a list"),
        ({"role": "user"}, {}, "messages: expected a list"),
        ([USER, "Hi"], {}, r"messages\[1\]: expected an object, got str"),
        (
            [USER],
            {"continue_final_message": True},
            "add_generation_prompt and continue_final_message exclude",
        ),
        ([USER], {"messages_": 1, "add_generation_prompt": True, "tools": None}, None),
        (
            [{"role": "assistant", "tool_calls": []}],
            {"continue_final_message": True, "add_generation_prompt": False},
            "the last message has no text to continue",
        ),
    ],
)
def test_arguments_are_checked(messages: Any, arguments: dict[str, Any], message: str | None) -> None:
    tokenizer = with_template("{{ messages | length }}")
    if message is None:
        assert tokenizer.chat_text(messages, **arguments) == "1"
        return
    with pytest.raises(ChatTemplateError, match=message):
        tokenizer.chat_text(messages, **arguments)


def test_a_template_that_drops_the_message_cannot_continue_it() -> None:
    tokenizer = with_template("{{ messages | length }} {{ messages[0].content | upper }}")
    with pytest.raises(ChatTemplateError, match="drops the last message's text"):
        tokenizer.chat_text([USER], add_generation_prompt=False, continue_final_message=True)


def test_set_arguments_are_not_template_variables() -> None:
    templates = with_template("{{ messages | length }}").chat_templates
    with pytest.raises(ChatTemplateError, match="tools is set by its own argument"):
        templates.render([USER], variables={"tools": []})
