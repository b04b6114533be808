"""Streams over HTTP: their bytes, their order, and what happens when one side leaves, is slow or fails."""

import asyncio
import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from fake_engine import ANSWER, FakeEngine, events_of, serving

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]
WIRE = re.compile(rb"(data: [\x20-\x7e]+\n\n)+")


def answer_to(prompt: str, index: int, num_bytes: int) -> str:
    """What the fake engine says, as far as `num_bytes` tokens go."""
    text = ANSWER.format(index=index, prompt=prompt[:4]).encode()
    return (text * (1 + num_bytes // len(text)))[:num_bytes].decode(errors="replace")


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Waits for something that another task brings about."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.005)


async def stream(client: Any, path: str, **fields: Any) -> tuple[bytes, list[dict[str, Any]]]:
    base: dict[str, Any] = {"prompt": "x"} if path == COMPLETIONS else {"messages": USER}
    response = await client.post(path, json=base | {"stream": True} | fields)
    assert response.status == 200, await response.text()
    assert response.content_type == "text/event-stream"
    body = await response.read()
    return body, events_of(body)


async def test_bytes_of_a_stream() -> None:
    async with serving(FakeEngine()) as client:
        for path in (CHAT, COMPLETIONS):
            body, events = await stream(client, path, max_tokens=60)
            assert WIRE.fullmatch(body)
            assert len({event["id"] for event in events}) == 1
            assert all(event["model"] == "mock" and isinstance(event["created"], int) for event in events)
            assert all("usage" not in event and "error" not in event for event in events)


async def test_chat_stream_obeys_the_rules_of_clients() -> None:
    async with serving(FakeEngine()) as client:
        _, events = await stream(client, CHAT, max_tokens=40)
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        choices = [event["choices"][0] for event in events]
        assert ["role" in choice["delta"] for choice in choices] == [True] + [False] * (len(choices) - 1)
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert all(set(choice["delta"]) <= {"role", "content"} for choice in choices)
        text = "".join(choice["delta"]["content"] for choice in choices)
        assert text == answer_to("<user>hi", 0, 40)
        # Halves of characters never show: the answer holds a four-byte one.
        assert "\ufffd" not in text


async def test_stream_equals_whole_reply() -> None:
    fields = {"max_tokens": 50, "n": 3, "stop": ["2 of"], "logprobs": 2}
    async with serving(FakeEngine()) as client:
        response = await client.post(COMPLETIONS, json={"prompt": ["ab", "cd"], **fields})
        whole = (await response.json())["choices"]
        _, events = await stream(client, COMPLETIONS, prompt=["ab", "cd"], **fields)
        assert [choice["index"] for choice in whole] == list(range(6))
        for choice in whole:
            pieces = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
            assert "".join(piece["text"] for piece in pieces) == choice["text"]
            assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
            assert pieces[-1]["finish_reason"] == choice["finish_reason"]
            assert pieces[-1]["stop_reason"] == choice["stop_reason"]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                joined = [item for piece in pieces for item in piece["logprobs"][name]]
                assert joined == choice["logprobs"][name]
        assert whole[2]["finish_reason"] == "stop"
        assert whole[2]["stop_reason"] == "2 of"
        assert "2 of" not in whole[2]["text"]


async def test_several_answers_are_interleaved() -> None:
    async with serving(FakeEngine(step_s=0.002)) as client:
        _, events = await stream(client, CHAT, n=3, max_tokens=20, stop=["1 of"])
        indexes = [event["choices"][0]["index"] for event in events]
        assert indexes[:3] == [0, 1, 2]
        assert indexes != sorted(indexes)
        for index in range(3):
            choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
            assert ["role" in choice["delta"] for choice in choices].count(True) == 1
            assert "role" in choices[0]["delta"]
            reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
            assert reasons == ["stop" if index == 1 else "length"]


async def test_usage_comes_when_asked_for() -> None:
    engine = FakeEngine(num_cached_tokens=1)
    async with serving(engine) as client:
        usage = {
            "prompt_tokens": 3,
            "completion_tokens": 2 * 2 * 10,
            "total_tokens": 43,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        fields = {"prompt": ["a", "bc"], "n": 2, "max_tokens": 10}
        _, events = await stream(client, COMPLETIONS, **fields, stream_options={"include_usage": True})
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == usage
        assert all(event["usage"] is None and event["choices"] for event in events[:-1])
        options = {"include_usage": True, "continuous_usage_stats": True}
        _, events = await stream(client, COMPLETIONS, **fields, stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert events[-1]["usage"] == usage
        _, events = await stream(client, COMPLETIONS, **fields, stream_options={"include_usage": False})
        assert all("usage" not in event for event in events)
        response = await client.post(COMPLETIONS, json=fields)
        assert (await response.json())["usage"] == usage


async def test_chat_logprobs() -> None:
    async with serving(FakeEngine()) as client:
        response = await client.post(
            CHAT, json={"messages": USER, "logprobs": True, "top_logprobs": 2, "max_tokens": 4}
        )
        choice = (await response.json())["choices"][0]
        content = choice["logprobs"]["content"]
        assert [token["bytes"] for token in content] == [[byte] for byte in answer_to("", 0, 4).encode()[:4]]
        assert all(len(token["top_logprobs"]) == 2 for token in content)
        assert all(token["top_logprobs"][0]["logprob"] == token["logprob"] for token in content)
        response = await client.post(CHAT, json={"messages": USER, "logprobs": True, "max_tokens": 4})
        content = (await response.json())["choices"][0]["logprobs"]["content"]
        assert [token["top_logprobs"] for token in content] == [[]] * 4
        response = await client.post(CHAT, json={"messages": USER, "max_tokens": 4})
        assert (await response.json())["choices"][0]["logprobs"] is None


async def test_completion_logprobs_repeat_the_same_number() -> None:
    async with serving(FakeEngine()) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "x", "logprobs": 1, "max_tokens": 8})
        shown = (await response.json())["choices"][0]["logprobs"]
        assert all(
            value == max(top.values())
            for value, top in zip(shown["token_logprobs"], shown["top_logprobs"], strict=True)
        )
        # "Gr\u00fc\u00dfe ": the bytes of a character begin where it begins.
        assert shown["text_offset"] == [0, 1, 2, 2, 3, 3, 4, 5]


async def test_body_ends_together_with_done() -> None:
    async with serving(FakeEngine()) as client:
        reader, writer = await asyncio.open_connection(client.server.host, client.server.port)
        body = b'{"prompt": "x", "stream": true}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        received = b""
        while b"[DONE]" not in received:
            received += await reader.read(1 << 20)
        # The read that brought the last event brought the end of the body as well.
        assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        writer.close()
        await writer.wait_closed()


async def test_first_event_comes_with_the_first_token() -> None:
    async with serving(FakeEngine(step_s=0.2)) as client:
        started = time.monotonic()
        response = await client.post(CHAT, json={"messages": USER, "stream": True, "max_tokens": 2})
        assert time.monotonic() - started > 0.19
        first = await response.content.readuntil(b"\n\n")
        assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"] == {
            "role": "assistant",
            "content": "G",
        }


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("streaming", [True, False])
async def test_client_that_leaves_ends_its_request(path: str, streaming: bool) -> None:
    engine = FakeEngine(step_s=0.01)
    async with serving(engine) as client:
        fields = {"messages": USER, "prompt": ["a", "b"], "n": 2, "max_tokens": 3000, "stream": streaming}
        call = asyncio.create_task(client.post(path, json=fields))
        await until(lambda: bool(engine.running) and len(engine.submitted[0].samples[0].token_ids) > 2)
        if streaming:
            response = await call
            await response.content.readany()
            response.close()
        else:
            call.cancel()
        await until(lambda: not engine.running)
        assert len(engine.aborted) == len(engine.submitted)
        # The server goes on.
        assert (await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1})).status == 200


async def test_slow_reader_holds_up_nobody_and_costs_no_more_than_its_answer() -> None:
    engine = FakeEngine(max_model_len=500_000)
    async with serving(engine) as client:
        body = json.dumps(
            {"prompt": "x", "n": 8, "max_tokens": 20_000, "stream": True, "stop": None}
        ).encode()
        reader, writer = await asyncio.open_connection(client.server.host, client.server.port, limit=1024)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        await until(lambda: bool(engine.submitted))
        slow = engine.submitted[0]
        # Nobody reads the first stream. Others are served meanwhile, and the engine finishes it.
        for _ in range(3):
            response = await client.post(COMPLETIONS, json={"prompt": "y", "max_tokens": 30, "stream": True})
            assert len(events_of(await response.read())) > 10
        await until(lambda: slow.finished, timeout_s=60.0)
        received = b""
        while b"[DONE]" not in received:
            received += await reader.read(1 << 20)
        writer.close()
        await writer.wait_closed()
        events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
        # What came while nobody read went out in large pieces, and nothing is missing.
        assert len(events) < 8 * 20_000
        for index in range(8):
            text = "".join(e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == index)
            assert text == answer_to("x", index, 20_000)


async def test_failure_inside_a_stream_is_an_event() -> None:
    async with serving(FakeEngine(fail_after=5)) as client:
        response = await client.post(CHAT, json={"messages": USER, "stream": True})
        body = await response.read()
        assert WIRE.fullmatch(body)
        assert b"[DONE]" not in body
        last = json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))
        assert last["error"]["code"] == "request_failed"
        assert set(last["error"]) == {"message", "type", "param", "code"}


async def test_failure_before_the_first_event_keeps_its_status() -> None:
    async with serving(FakeEngine(fail_after=0)) as client:
        response = await client.post(CHAT, json={"messages": USER, "stream": True})
        assert response.status == 500
        assert (await response.json())["error"]["code"] == "request_failed"


async def test_field_semantics_reach_the_engine() -> None:
    engine = FakeEngine()
    async with serving(engine) as client:
        fields = {
            "n": 2,
            "temperature": 0,
            "top_p": 0.5,
            "top_k": -1,
            "min_p": 0.1,
            "seed": 2**64 - 1,
            "max_tokens": 5,
            "max_completion_tokens": 7,
            "stop": "zz",
            "stop_token_ids": [3],
            "ignore_eos": True,
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "cache_salt": "tenant",
        }
        response = await client.post(COMPLETIONS, json={"prompt": [1, 2], **fields})
        assert response.status == 200
        request = engine.submitted[0].request
        assert request.prompt_token_ids == [1, 2]
        assert request.salt == b"tenant"
        params = request.params
        assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (
            2,
            0,
            0.5,
            -1,
            0.1,
        )
        assert (params.seed, params.max_tokens, params.stop) == (2**64 - 1, 7, ("zz",))
        assert (params.stop_ids, params.ignore_eos, params.skip_special_tokens) == ((3,), True, False)
        assert params.include_stop_str_in_output
        await client.post(COMPLETIONS, json={"prompt": "abc"})
        assert engine.submitted[1].request.max_tokens == 16
        await client.post(CHAT, json={"messages": USER, "stop": ["G"]})
        chat = engine.submitted[2].request
        assert chat.prompt_token_ids == list(b"<user>hi<assistant>")
        assert chat.max_tokens == engine.max_model_len - len(chat.prompt_token_ids)
        await client.post(
            CHAT,
            json={
                "messages": [*USER, {"role": "assistant", "content": "Sure"}],
                "continue_final_message": True,
                "max_tokens": 1,
            },
        )
        assert engine.submitted[3].request.prompt_token_ids == list(b"<user>hi<assistant>Sure")


async def test_shutdown_ends_the_engine() -> None:
    engine = FakeEngine()
    async with serving(engine):
        assert not engine.was_shut_down
    assert engine.was_shut_down
