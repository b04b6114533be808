"""Errors over HTTP: every one has OpenAI's shape, the right status, and a message that helps."""

import asyncio
import gzip
import io
import json
import logging
import re
import threading
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from fake_engine import VOCAB_SIZE, FakeEngine, serving
from pagedkv.serve import bodies
from pagedkv.serve.protocol import parse_request

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


async def error_of(response: Any, status: int) -> dict[str, Any]:
    """The error object of a response, whose shape is checked."""
    assert response.status == status, await response.text()
    assert response.content_type == "application/json"
    assert response.headers["X-Request-Id"]
    body = await response.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


async def refused(
    client: TestClient, status: int = 400, path: str = COMPLETIONS, **fields: Any
) -> dict[str, Any]:
    base: dict[str, Any] = (
        {"prompt": "x"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    )
    return await error_of(await client.post(path, json=base | fields), status)


async def test_addresses_and_methods() -> None:
    async with serving(FakeEngine()) as client:
        assert (await error_of(await client.get("/nowhere"), 404))["code"] == "not_found"
        assert (await error_of(await client.get("/v1/nowhere"), 404))["type"] == "invalid_request_error"
        response = await client.get(CHAT)
        assert "POST" in (await error_of(response, 405))["message"]
        assert response.headers["Allow"] == "POST"
        await error_of(await client.delete("/v1/models"), 405)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1]", b'{"prompt": NaN}', b"\xff\xfe", b'{"prompt": "\\ud800"}']
)
async def test_bodies_that_are_no_json_object(raw: bytes) -> None:
    async with serving(FakeEngine()) as client:
        error = await error_of(await client.post(COMPLETIONS, data=raw), 400)
        assert error["code"] == "invalid_json"


async def test_broken_compression_is_a_bad_request() -> None:
    async with serving(FakeEngine()) as client:
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        body = gzip.compress(b'{"prompt": "x"}')
        assert (await client.post(COMPLETIONS, data=body, headers=headers)).status == 200
        response = await client.post(COMPLETIONS, data=b"no gzip at all", headers=headers)
        assert response.status == 400


async def test_large_bodies() -> None:
    async with serving(FakeEngine()) as client:
        # 3 MiB pass as a body; they are refused for their length in tokens.
        body = io.BytesIO(json.dumps({"prompt": "x" * (3 * 2**20)}).encode())
        error = await error_of(await client.post(COMPLETIONS, data=body), 400)
        assert error["code"] == "context_length_exceeded"
        response = await client.post(COMPLETIONS, data=io.BytesIO(b" " * (65 * 2**20)))
        assert (await error_of(response, 413))["code"] == "request_too_large"


async def test_large_bodies_leave_the_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def parse(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return parse_request(*arguments, **options)

    monkeypatch.setattr(bodies, "parse_request", parse)
    async with serving(FakeEngine(max_model_len=500_000)) as client:
        for num_chars in (10, bodies.INLINE_BYTES):
            response = await client.post(COMPLETIONS, json={"prompt": "x" * num_chars, "max_tokens": 1})
            assert (await response.json())["usage"]["prompt_tokens"] == num_chars
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()


async def test_unknown_model() -> None:
    async with serving(FakeEngine(), names=("a", "org/b")) as client:
        for path in (COMPLETIONS, CHAT):
            error = await refused(client, 404, path, model="other")
            assert (error["code"], error["param"]) == ("model_not_found", "model")
            assert "org/b" in error["message"]
        await error_of(await client.get("/v1/models/other"), 404)
        for name, status in (("org/b", 200), ("org%2Fb", 200)):
            response = await client.get(f"/v1/models/{name}")
            assert response.status == status
            assert (await response.json())["id"] == "org/b"


async def test_context_overflow_says_the_numbers() -> None:
    engine = FakeEngine(max_model_len=32)
    async with serving(engine) as client:
        for fields, param, numbers in (
            ({"prompt": "x" * 32}, "prompt", ("32",)),
            ({"prompt": "x" * 40, "max_tokens": 5}, "prompt", ("40",)),
            ({"prompt": "x" * 28, "max_tokens": 5}, "max_tokens", ("28", "5", "33")),
            ({"prompt": "x" * 28, "max_completion_tokens": 5}, "max_completion_tokens", ("28", "5", "33")),
        ):
            error = await refused(client, **fields)
            assert error["code"] == "context_length_exceeded"
            assert "This model's maximum context length is 32 tokens" in error["message"]
            assert error["param"] == param
            assert all(number in error["message"] for number in numbers)
        error = await refused(client, path=CHAT, messages=[{"role": "user", "content": "x" * 40}])
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert engine.submitted == []


async def test_prompt_that_just_fits() -> None:
    engine = FakeEngine(max_model_len=32)
    async with serving(engine) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "x" * 31})
        body = await response.json()
        assert body["usage"] == {
            "prompt_tokens": 31,
            "completion_tokens": 1,
            "total_tokens": 32,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        response = await client.post(COMPLETIONS, json={"prompt": "x" * 28, "max_tokens": 4})
        assert (await response.json())["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    ("prompt", "param", "wrong"),
    [
        ("", "prompt", "is empty"),
        ([""], "prompt", "is empty"),
        ([[]], "prompt", "is empty"),
        (["a", ""], "prompt[1]", "is empty"),
        ([[1], []], "prompt[1]", "is empty"),
        ([VOCAB_SIZE], "prompt", f"has the token id {VOCAB_SIZE}, allowed: 0..{VOCAB_SIZE - 1}"),
        ([-1], "prompt", "has the token id -1"),
        ([1, 2**70], "prompt", f"has the token id {2**70}"),
        ([[1], [VOCAB_SIZE]], "prompt[1]", f"has the token id {VOCAB_SIZE}"),
        ([1, True], "prompt", "has a bool at place 1"),
        ([1, "a"], "prompt", "has a str at place 1"),
        ([[1], [True]], "prompt[1]", "has a bool at place 0"),
        ([[1], [2, None]], "prompt[1]", "has a NoneType at place 1"),
    ],
)
async def test_one_bad_prompt_refuses_all(prompt: Any, param: str, wrong: str) -> None:
    engine = FakeEngine()
    async with serving(engine) as client:
        error = await refused(client, prompt=prompt)
        assert (error["param"], error["code"]) == (param, "invalid_value")
        assert error["message"].startswith(f"prompt {wrong}")
    assert engine.submitted == []


async def test_one_long_prompt_refuses_all() -> None:
    engine = FakeEngine(max_model_len=32)
    async with serving(engine) as client:
        error = await refused(client, prompt=["a", "b" * 40, "c"])
        assert error["param"] == "prompt[1]"
    assert engine.submitted == []


async def test_stop_token_beyond_the_vocabulary_is_refused() -> None:
    async with serving(FakeEngine()) as client:
        for path in (COMPLETIONS, CHAT):
            error = await refused(client, path=path, stop_token_ids=[5, VOCAB_SIZE])
            assert (error["param"], error["code"]) == ("stop_token_ids", "invalid_value")
            assert f"has the token id {VOCAB_SIZE}" in error["message"]


async def test_template_that_refuses() -> None:
    async with serving(FakeEngine()) as client:
        error = await refused(client, path=CHAT, chat_template_kwargs={"refuse": True})
        assert error["param"] == "messages"
        assert "roles must alternate" in error["message"]


async def test_full_queue_asks_to_come_back() -> None:
    engine = FakeEngine(capacity=2)
    async with serving(engine) as client:
        for stream in (False, True):
            response = await client.post(COMPLETIONS, json={"prompt": ["a", "b", "c"], "stream": stream})
            error = await error_of(response, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert response.headers["Retry-After"] == "1"
            # What had been taken before the queue was full is given back.
            assert engine.running == set()
        response = await client.post(COMPLETIONS, json={"prompt": ["a", "b"]})
        assert response.status == 200


async def test_dead_engine() -> None:
    async with serving(FakeEngine(dead=True)) as client:
        assert (await refused(client, 503))["code"] == "engine_dead"
        assert (await refused(client, 503, CHAT, stream=True))["code"] == "engine_dead"


async def test_failed_step_is_a_server_error() -> None:
    async with serving(FakeEngine(fail_after=3)) as client:
        error = await refused(client, 500)
        assert (error["type"], error["code"]) == ("server_error", "request_failed")


async def test_fault_of_our_own_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(fail_after=3, failure=ZeroDivisionError("secret detail"))
    async with serving(engine) as client:
        with caplog.at_level(logging.ERROR, "pagedkv.serve"):
            response = await client.post(COMPLETIONS, json={"prompt": "x"}, headers={"X-Request-Id": "req-7"})
        error = await error_of(response, 500)
        assert "secret" not in error["message"]
        assert "req-7" in error["message"]
        assert "ZeroDivisionError" in caplog.text


async def test_request_ids() -> None:
    engine = FakeEngine()
    async with serving(engine) as client:
        response = await client.get("/health", headers={"X-Request-Id": "mine"})
        assert response.headers["X-Request-Id"] == "mine"
        for bad in ("x" * 200, "with space", "\xe4"):
            response = await client.get("/health", headers={"X-Request-Id": bad})
            assert response.headers["X-Request-Id"] != bad
        same = {"X-Request-Id": "same"}
        calls = [client.post(COMPLETIONS, json={"prompt": "x"}, headers=same) for _ in range(2)]
        bodies = [await response.json() for response in await asyncio.gather(*calls)]
        assert len({body["id"] for body in bodies}) == 2
    assert len({stream.request_id for stream in engine.submitted}) == 2


async def test_ignored_fields_are_named_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    fields = {"prompt": "x", "stream": True, "zeta": 1, "al\r\npha": 2, "user": "u", "guided_x": None}
    async with serving(FakeEngine()) as client:
        with caplog.at_level(logging.WARNING, "pagedkv.serve"):
            for _ in range(2):
                response = await client.post(COMPLETIONS, json=fields)
                assert response.status == 200
                assert response.headers["x-pagedkv-ignored"] == "al??pha,zeta"
        assert caplog.text.count('"zeta"') == 1
        response = await client.post(COMPLETIONS, json={"prompt": "x"})
        assert "x-pagedkv-ignored" not in response.headers
    async with serving(FakeEngine(), strict=True) as client:
        assert (await refused(client, zeta=1))["param"] == "zeta"
        assert (await client.post(COMPLETIONS, json={"prompt": "x", "user": "u"})).status == 200


async def test_key_is_asked_for_where_it_must_be() -> None:
    async with serving(FakeEngine(), api_keys=("s3cret",)) as client:
        for headers in (
            {},
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer wrong"},
            {"api-key": "no"},
        ):
            response = await client.get("/v1/models", headers=headers)
            assert (await error_of(response, 401))["code"] == "invalid_api_key"
        for headers in (
            {"Authorization": "Bearer s3cret"},
            {"Authorization": "bearer s3cret"},
            {"api-key": "s3cret"},
            {"x-api-key": "s3cret"},
        ):
            assert (await client.get("/v1/models", headers=headers)).status == 200
        for path in ("/health", "/metrics", "/version"):
            assert (await client.get(path)).status == 200


@pytest.mark.parametrize("authorization", ["Bearer ", "Bearer undefined", "Bearer x", "Basic eDp5"])
async def test_any_key_is_accepted_without_a_configured_one(authorization: str) -> None:
    async with serving(FakeEngine()) as client:
        response = await client.get("/v1/models", headers={"Authorization": authorization})
        assert response.status == 200


async def test_browsers_may_call() -> None:
    asked = {
        "Origin": "http://localhost:3000",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
    }
    async with serving(FakeEngine(), api_keys=("k",)) as client:
        response = await client.options(CHAT, headers=asked)
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == "*"
        assert response.headers["Access-Control-Allow-Headers"] == asked["Access-Control-Request-Headers"]
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        headers = {"Authorization": "Bearer k", "Origin": asked["Origin"]}
        response = await client.post(CHAT, json=body, headers=headers)
        assert response.headers["Access-Control-Allow-Origin"] == "*"
        response = await client.post(CHAT, json=body)
        assert response.status == 401
        assert response.headers["Access-Control-Allow-Origin"] == "*"


async def test_bytes_in_headers_that_are_no_text() -> None:
    async with serving(FakeEngine(), api_keys=("s3cret",)) as client:
        reader, writer = await asyncio.open_connection(client.server.host, client.server.port)
        for method in (b"GET", b"OPTIONS"):
            writer.write(
                method + b" /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n"
                b"X-Request-Id: \xff\r\nAccess-Control-Request-Method: POST\r\n"
                b"Access-Control-Request-Headers: \xff\xfe\r\n\r\n"
            )
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 401" if method == b"GET" else b"HTTP/1.1 204")
            length = re.search(rb"Content-Length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
        writer.close()
        await writer.wait_closed()


async def test_client_that_leaves_while_it_sends_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    async with serving(engine) as client:
        _, writer = await asyncio.open_connection(client.server.host, client.server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.05)
        assert (await client.post(COMPLETIONS, json={"prompt": "x"})).status == 200
    assert "failed" not in caplog.text
    assert len(engine.submitted) == 1


async def test_body_without_content_type_is_read() -> None:
    async with serving(FakeEngine()) as client:
        response = await client.post(COMPLETIONS, data=json.dumps({"prompt": "x"}).encode())
        assert response.status == 200
