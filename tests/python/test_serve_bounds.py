"""Bodies that ask for more than they may: refused by their size, before anything looks at what they hold."""

import asyncio
import io
import json
import logging
import re
import time
from typing import Any

import pytest

from fake_engine import FakeEngine, serving
from pagedkv.serve import protocol
from pagedkv.serve.app import max_body_bytes
from pagedkv.serve.errors import ApiError, shown
from pagedkv.serve.json_body import MAX_CONTAINERS, parse_json
from pagedkv.serve.protocol import ChatRequest, CompletionRequest, parse_request

COMPLETIONS = "/v1/completions"
TEXT = {"type": "text", "text": "x"}
CALL = {"id": "1", "function": {"name": "f", "arguments": ""}}


def refused(kind: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_request(kind, json.dumps(fields).encode(), strict=False)
    assert (caught.value.status, caught.value.code) == (400, "invalid_value")
    return caught.value


@pytest.mark.parametrize("one", ["x", [5], 1.5, None, {}])
def test_many_prompts_are_counted_first(one: Any) -> None:
    error = refused(CompletionRequest, prompt=[one] * (protocol.MAX_SEQUENCES + 1))
    assert error.param == "prompt"
    assert "must have at most 1024 prompts, has 1025, got [" in error.message


def test_prompts_times_answers() -> None:
    error = refused(CompletionRequest, prompt=["x"] * 600, n=2)
    assert error.param == "prompt"
    assert "must be at most 1024, got 1200" in error.message


def test_many_messages_are_counted_first() -> None:
    error = refused(ChatRequest, messages=[5] * (protocol.MAX_MESSAGES + 1))
    assert (error.param, "at most 4096 messages, has 4097" in error.message) == ("messages", True)


@pytest.mark.parametrize("items", [{"content": [5] * 9000}, {"tool_calls": [CALL] * 9000}])
def test_parts_and_calls_of_all_messages_are_counted_first(items: dict[str, Any]) -> None:
    error = refused(ChatRequest, messages=[{"role": "nobody", **items}] * 2)
    assert (error.param, "at most 16384 content parts and tool calls, have 18000" in error.message) == (
        "messages",
        True,
    )


def test_what_the_bounds_allow_is_read() -> None:
    messages = [{"role": "user", "content": [TEXT] * 4}] * protocol.MAX_MESSAGES
    request, _ = parse_request(ChatRequest, json.dumps({"messages": messages}).encode(), strict=False)
    assert len(request.messages) == protocol.MAX_MESSAGES
    body = {"prompt": ["x"] * protocol.MAX_SEQUENCES}
    completion, _ = parse_request(CompletionRequest, json.dumps(body).encode(), strict=False)
    assert len(completion.prompt) == protocol.MAX_SEQUENCES


def test_fields_are_counted_everywhere() -> None:
    many = {f"f{i}": i for i in range(protocol.MAX_FIELDS + 1)}
    assert "must have at most 256 fields, has 258" in refused(CompletionRequest, prompt="x", **many).message
    user = {"role": "user", "content": "x"}
    error = refused(ChatRequest, messages=[user, user | many])
    assert (error.param, "must have at most 256 fields" in error.message) == ("messages[1]", True)
    error = refused(ChatRequest, messages=[user | {"content": [TEXT | many]}])
    assert error.param == "messages[0].content[0]"
    error = refused(ChatRequest, messages=[user], stream=True, stream_options=many)
    assert error.param == "stream_options"


@pytest.mark.parametrize("opened", [b"[[[],", b"[{},"])
def test_lists_and_objects_are_counted_before_they_are_made(opened: bytes) -> None:
    raw = b'{"prompt": ' + opened * (MAX_CONTAINERS // 2)
    with pytest.raises(ApiError, match=f"at most {MAX_CONTAINERS} lists and objects") as caught:
        parse_json(raw)
    assert caught.value.status == 400


@pytest.mark.parametrize("ending", [b'"}', b"", b"\\", b'\\"', b"\n"])
def test_brackets_in_texts_do_not_count(ending: bytes) -> None:
    raw = b'{"a": "\\"", "prompt": "' + b'[{\\"\\\\' * MAX_CONTAINERS + ending
    started = time.perf_counter()
    if ending == b'"}':
        assert parse_json(raw)["prompt"] == '[{"\\' * MAX_CONTAINERS
    else:
        with pytest.raises(ApiError, match="is not valid JSON"):
            parse_json(raw)
    # A search that starts again at every quote would take hours.
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\xed\xb0\x80"}',
        '{"prompt": "x"}'.encode("utf-16"),
        b'{"\xff": 1}',
    ],
)
def test_bytes_that_are_no_utf8_are_refused(raw: bytes) -> None:
    with pytest.raises(ApiError, match="is not valid UTF-8 at byte") as caught:
        parse_json(raw)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_a_byte_order_mark_is_no_part_of_the_body() -> None:
    assert parse_json(b"\xef\xbb\xbf" + '{"a": "gr\u00fc\u00dfe"}'.encode()) == {"a": "gr\u00fc\u00dfe"}


def test_large_values_are_shown_without_being_written() -> None:
    started = time.perf_counter()
    assert shown([[5]] * 2_000_000) == json.dumps([[5]] * 100)[:80] + "..."
    assert shown("x" * 50_000_000) == '"' + "x" * 79 + "..."
    assert time.perf_counter() - started < 2
    assert shown({"a": [1.5, None, "\u00fc"]}) == json.dumps({"a": [1.5, None, "\u00fc"]})


def test_the_largest_body_follows_from_the_context() -> None:
    mib = 2**20
    assert [max_body_bytes(n) // mib for n in (256, 131_072, 262_144, 1_048_576, 10**7)] == [8, 8, 16, 64, 64]


async def test_a_body_beyond_the_bound_is_refused_as_json() -> None:
    async with serving(FakeEngine()) as client:
        response = await client.post(COMPLETIONS, data=io.BytesIO(b" " * (max_body_bytes(4096) + 1)))
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"


async def test_a_full_queue_is_told_in_one_sentence() -> None:
    async with serving(FakeEngine(capacity=1)) as client:
        response = await client.post(COMPLETIONS, json={"prompt": ["a", "b"]})
        message = (await response.json())["error"]["message"]
    assert message == "1 requests are in flight; try again later."


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nno header\r\n\r\n",
    ],
)
async def test_what_is_no_http_leaves_no_trace_in_the_log(
    request_bytes: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with serving(FakeEngine()) as client:
        assert client.port is not None
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(request_bytes)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert re.match(rb"HTTP/1\.[01] 400 ", answer)
        assert (await client.get("/version")).status == 200
    assert [record for record in caplog.records if record.levelno > logging.INFO] == []
