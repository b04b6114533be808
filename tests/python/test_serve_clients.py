"""Replays what real client libraries sent: none of it may fail, unless it asks for what is unsupported."""

import json
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine, events_of, serving

CAPTURED = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "client_requests.jsonl").read_text().splitlines()
]


def name_of(captured: dict[str, Any]) -> str:
    return f"{captured['client']}-{captured['path'].rsplit('/', 1)[-1]}"


@pytest.mark.parametrize("captured", CAPTURED, ids=name_of)
async def test_captured_request(captured: dict[str, Any]) -> None:
    async with serving(FakeEngine(max_model_len=512)) as client:
        headers = {"Authorization": "Bearer sk-x"}
        response = await client.request(
            captured["method"], captured["path"], json=captured["body"], headers=headers
        )
        if captured["refused"] is not None:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == captured["refused"]
            return
        assert response.status == 200, await response.text()
        assert ("x-pagedkv-ignored" in response.headers) == ("foo" in (captured["body"] or {}))
        if captured["method"] != "POST":
            return
        if captured["body"].get("stream"):
            events = events_of(await response.read())
            assert all(event["choices"][0]["index"] == 0 for event in events if event["choices"])
        else:
            body = await response.json()
            assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
            assert "error" not in body


async def test_whole_reply_has_what_clients_read() -> None:
    async with serving(FakeEngine()) as client:
        response = await client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "stop": ["of"]}
        )
        body = await response.json()
        assert body["id"].startswith("chatcmpl-")
        assert body["object"] == "chat.completion"
        assert isinstance(body["created"], int)
        assert body["model"] == "mock"
        choice = body["choices"][0]
        assert choice["message"] == {"role": "assistant", "content": "Grüße \U0001f9ea 0 "}
        assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
        assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        response = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
        body = await response.json()
        assert body["object"] == "text_completion"
        assert body["choices"] == [
            {"index": 0, "text": "Gr\ufffd", "logprobs": None, "finish_reason": "length", "stop_reason": None}
        ]


async def test_whether_a_model_thinks_is_up_to_the_client() -> None:
    engine = FakeEngine()
    async with serving(engine) as client:
        fields = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        switches: list[dict[str, Any]] = [
            {},
            {"enable_thinking": False},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ]
        for switch in switches:
            response = await client.post("/v1/chat/completions", json=fields | switch)
            assert response.status == 200
            assert "x-pagedkv-ignored" not in response.headers
    prompts = [stream.request.prompt for stream in engine.submitted]
    assert prompts == ["<user>x<assistant>", *2 * ["<user>x<assistant><no thoughts>"]]


async def test_reply_can_be_sent_back_as_history() -> None:
    async with serving(FakeEngine()) as client:
        question = {"role": "user", "content": "x"}
        fields = {"messages": [question], "max_tokens": 5}
        first = await (await client.post("/v1/chat/completions", json=fields)).json()
        message = first["choices"][0]["message"] | {"refusal": None, "annotations": None, "tool_calls": None}
        fields = {"messages": [question, message, question], "max_tokens": 5}
        assert (await client.post("/v1/chat/completions", json=fields)).status == 200


async def test_models_list_says_the_context_length() -> None:
    async with serving(FakeEngine(max_model_len=77), names=("a", "b")) as client:
        body = await (await client.get("/v1/models")).json()
        assert body["object"] == "list"
        assert [entry["id"] for entry in body["data"]] == ["a", "b"]
        assert set(body["data"][0]) == {
            "id",
            "object",
            "created",
            "owned_by",
            "root",
            "parent",
            "max_model_len",
        }
        assert body["data"][0]["max_model_len"] == 77
        response = await client.post("/v1/completions", json={"model": "b", "prompt": "x"})
        assert (await response.json())["model"] == "b"
        response = await client.post("/v1/completions", json={"prompt": "x"})
        assert (await response.json())["model"] == "a"
        assert (await (await client.get("/version")).json())["version"]
