"""Sessions, pins, lookups and resets through HTTP, on the real engine with a tiny model."""

import asyncio
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient

from fake_engine import answer_of, post, serving
from pagedkv import AsyncLLM
from test_serve_metrics import samples_of
from tiny_llm import Checkpoint, at_rest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PINS = "/v1/cache/pins"
SESSIONS = "/v1/sessions"
LOOKUP = "/v1/cache/lookup"
TEXT = "the cat sat on the mat and the dog sat on the log " * 4
USER = {"role": "user", "content": TEXT}
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
LONG = {"temperature": 0, "max_tokens": 6000, "ignore_eos": True}
TENANT = {"x-cache-salt": "mine"}


@pytest_asyncio.fixture
async def engine(shared_async_llm: AsyncLLM) -> AsyncIterator[AsyncLLM]:
    """An engine of which every test leaves nothing behind."""
    shared = shared_async_llm
    await shared.reset_prefix_cache()
    yield shared
    for salt in (b"", b"mine", b"other"):
        for session in await shared.sessions(salt=salt):
            await shared.delete_session(session.id, salt=salt)
        for pin in await shared.pins(salt=salt):
            await shared.unpin(pin.id, salt=salt)
    await at_rest(shared)


async def refused(response: ClientResponse, status: int) -> dict[str, Any]:
    error = dict((await answer_of(response, status))["error"])
    assert error["type"] == "invalid_request_error"
    return error


def cached(body: dict[str, Any]) -> int:
    return int(body["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_session_is_begun_continued_and_shown(
    engine: AsyncLLM, client: TestClient, stream: bool
) -> None:
    fields = {"session_id": "s", "stream": stream, **GREEDY}
    response = await client.post(COMPLETIONS, json={"prompt": TEXT, "session_ttl": 60, **fields})
    assert response.status == 200
    await response.read()
    begun = await engine.session_token_ids("s")
    assert begun[:-8] == engine.tokenizer.encode(TEXT)
    shown = await answer_of(await client.get(f"{SESSIONS}/s"))
    assert shown == {
        "object": "session",
        "id": "s",
        "tokens": len(begun),
        "blocks": math.ceil((len(begun) - 1) / 16),
        "expires_at": shown["expires_at"],
    }
    assert abs(shown["expires_at"] - time.time() - 60) < 5
    assert await answer_of(await client.get(SESSIONS)) == {"object": "list", "data": [shown]}
    prompt = [*begun, *engine.tokenizer.encode(" on the", add_special_tokens=False)]
    alone = await post(client, COMPLETIONS, prompt=prompt, cache_salt="other", **GREEDY)
    response = await client.post(COMPLETIONS, json={"prompt": " on the", "append": True, **fields})
    assert response.status == 200
    text = await response.text()
    if not stream:
        body = await response.json()
        assert body["choices"] == alone["choices"]
        assert body["usage"]["prompt_tokens"] == len(prompt)
        assert cached(body) >= len(begun) - 16
    assert "error" not in text
    after = await engine.session_token_ids("s")
    assert after[: len(prompt)] == prompt
    assert engine.tokenizer.decode(after[len(prompt) :]) == alone["choices"][0]["text"]


async def test_a_chat_finds_its_session(engine: AsyncLLM, client: TestClient) -> None:
    first = await post(client, CHAT, messages=[USER], session_id="chat", **GREEDY)
    reply = first["choices"][0]["message"]
    messages = [USER, reply, {"role": "user", "content": "and then?"}]
    second = await post(client, CHAT, messages=messages, session_id="chat", **GREEDY)
    assert cached(second) >= first["usage"]["prompt_tokens"] - 16
    assert (await engine.session("chat")).tokens == second["usage"]["total_tokens"]


async def test_forks(engine: AsyncLLM, client: TestClient) -> None:
    await post(client, COMPLETIONS, prompt=TEXT, session_id="a/b c", **GREEDY)
    path = f"{SESSIONS}/a%2Fb%20c"
    before = await answer_of(await client.get(path))
    pinned = engine.stats()["blocks_pinned"]
    named = await post(client, f"{path}/fork", id="second", ttl=30)
    assert named == {**before, "id": "second", "expires_at": named["expires_at"]}
    assert abs(named["expires_at"] - time.time() - 30) < 5
    unnamed = await answer_of(await client.post(f"{path}/fork"))
    assert unnamed["id"] not in ("a/b c", "second")
    assert engine.stats()["blocks_pinned"] == pinned
    listed = (await answer_of(await client.get(SESSIONS)))["data"]
    assert [session["id"] for session in listed] == ["a/b c", "second", unnamed["id"]]
    error = await refused(await client.post(f"{path}/fork", json={"id": "second"}), 409)
    assert (error["message"], error["code"]) == (
        'There is a session "second" already; delete it first.',
        "conflict",
    )
    for fields, param in (
        ({"ttl": 0}, "ttl"),
        ({"id": ""}, "id"),
        ({"id": "x" * 257}, "id"),
        ({"id": 5}, "id"),
    ):
        assert (await refused(await client.post(f"{path}/fork", json=fields), 400))["param"] == param
    gone = await answer_of(await client.delete(path))
    assert gone == {"id": "a/b c", "object": "session", "deleted": True}
    body = await post(client, COMPLETIONS, prompt=" x", session_id="second", append=True, **GREEDY)
    assert cached(body) >= before["tokens"] - 16


async def test_what_does_not_exist_is_404(client: TestClient) -> None:
    append = {"prompt": "x", "session_id": "no", "append": True}
    for response in (
        await client.get(f"{SESSIONS}/no"),
        await client.delete(f"{SESSIONS}/no"),
        await client.post(f"{SESSIONS}/no/fork"),
        await client.post(COMPLETIONS, json=append),
        await client.post(COMPLETIONS, json=append | {"stream": True}),
        await client.delete(f"{PINS}/no"),
    ):
        error = await refused(response, 404)
        assert error["code"] == "not_found"
        assert '"no"; it may have expired' in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": "x", "session_id": "s", "n": 2}, "n"),
        (COMPLETIONS, {"prompt": ["x", "y"], "session_id": "s"}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "session_ttl": 5}, "session_ttl"),
        (COMPLETIONS, {"prompt": "x", "append": True}, "append"),
        (COMPLETIONS, {"prompt": "x", "session_id": "s", "append": 1}, "append"),
        (COMPLETIONS, {"prompt": "x", "session_id": ""}, "session_id"),
        (COMPLETIONS, {"prompt": "x", "session_id": 5}, "session_id"),
        (COMPLETIONS, {"prompt": "x", "session_id": "x" * 257}, "session_id"),
        (COMPLETIONS, {"prompt": "x", "session_id": "s", "session_ttl": 0}, "session_ttl"),
        (COMPLETIONS, {"prompt": "x", "session_id": "s", "session_ttl": -1}, "session_ttl"),
        (COMPLETIONS, {"prompt": "x", "session_id": "s", "session_ttl": 86400.5}, "session_ttl"),
        (COMPLETIONS, {"prompt": "x", "session_id": "s", "session_ttl": "5"}, "session_ttl"),
        (COMPLETIONS, {"prompt": "x", "session_id": "s", "session_ttl": True}, "session_ttl"),
        (CHAT, {"messages": [USER], "session_id": "s", "n": 2}, "n"),
        (CHAT, {"messages": [USER], "session_ttl": 5}, "session_ttl"),
        (PINS, {}, "prompt"),
        (PINS, {"prompt": "x", "messages": [USER]}, "prompt"),
        (PINS, {"prompt": ["x", "y"]}, "prompt"),
        (PINS, {"prompt": ""}, "prompt"),
        (PINS, {"prompt": []}, "prompt"),
        (PINS, {"prompt": 5}, "prompt"),
        (PINS, {"prompt": [10**9]}, "prompt"),
        (PINS, {"prompt": [5] * 8000}, "prompt"),
        (PINS, {"messages": []}, "messages"),
        (PINS, {"messages": [{"role": "nobody"}]}, "messages[0].role"),
        (PINS, {"messages": [USER], "continue_final_message": True}, "continue_final_message"),
        (PINS, {"prompt": "x", "ttl": 0}, "ttl"),
        (PINS, {"prompt": "x", "ttl": -5}, "ttl"),
        (PINS, {"prompt": "x", "ttl": 86401}, "ttl"),
        (PINS, {"prompt": "x", "ttl": "60"}, "ttl"),
        (PINS, {"prompt": "x", "ttl": True}, "ttl"),
        (LOOKUP, {}, "prompt"),
        (LOOKUP, {"prompt": "x", "messages": [USER]}, "prompt"),
        (LOOKUP, {"prompt": [5] * 8000}, "prompt"),
    ],
)
async def test_refusals(
    engine: AsyncLLM, client: TestClient, path: str, fields: dict[str, Any], param: str
) -> None:
    error = await refused(await client.post(path, json=fields), 400)
    assert error["param"] == param, error
    assert error["code"] in ("invalid_value", "context_length_exceeded")
    assert (await engine.sessions(), await engine.pins()) == ([], [])
    assert engine.stats()["blocks_promised"] == 0


@pytest.mark.parametrize("ttl", ["NaN", "Infinity", "1e400"])
async def test_a_ttl_must_be_finite(client: TestClient, ttl: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = await client.post(PINS, data=f'{{"prompt": "x", "ttl": {ttl}}}', headers=headers)
    await refused(response, 400)


async def test_pins(engine: AsyncLLM, client: TestClient) -> None:
    tokens = len(engine.tokenizer.encode(TEXT))
    pin = await post(client, PINS, prompt=TEXT, ttl=60)
    assert pin == {
        "object": "cache.pin",
        "id": pin["id"],
        "tokens": tokens,
        "blocks": math.ceil(tokens / 16),
        "expires_at": pin["expires_at"],
    }
    assert abs(pin["expires_at"] - time.time() - 60) < 5
    assert await answer_of(await client.get(PINS)) == {"object": "list", "data": [pin]}
    assert cached(await post(client, COMPLETIONS, prompt=TEXT + "so", **GREEDY)) >= tokens // 16 * 16 - 16
    hit = (await answer_of(await client.get(PINS)))["data"][0]
    assert hit["expires_at"] > pin["expires_at"]
    # The same prompt again is a pin of its own, which shares the blocks.
    pinned = engine.stats()["blocks_pinned"]
    by_ids = await post(client, PINS, prompt=engine.tokenizer.encode(TEXT))
    assert by_ids["id"] != pin["id"]
    assert engine.stats()["blocks_pinned"] <= pinned + 1
    samples = await samples_of(client)
    assert samples["pagedkv:num_pins", ""] == 2
    assert samples["pagedkv:kv_blocks_pinned", ""] == engine.stats()["blocks_pinned"]
    assert samples["pagedkv:kv_blocks_pin_budget", ""] == 500
    gone = await answer_of(await client.delete(f"{PINS}/{pin['id']}"))
    assert gone == {"id": pin["id"], "object": "cache.pin", "deleted": True}
    await refused(await client.delete(f"{PINS}/{pin['id']}"), 404)
    assert [one["id"] for one in (await answer_of(await client.get(PINS)))["data"]] == [by_ids["id"]]


async def test_messages_are_pinned_as_the_chat_sends_them(engine: AsyncLLM, client: TestClient) -> None:
    pin = await post(client, PINS, messages=[USER], ttl=60)
    assert pin["tokens"] == len(engine.tokenizer.chat_prompt([USER]))
    opening = [{"role": "system", "content": TEXT * 2}]
    system = await post(client, PINS, messages=opening, add_generation_prompt=False)
    body = await post(client, CHAT, messages=[*opening, USER], **GREEDY)
    assert cached(body) >= system["tokens"] // 16 * 16


async def test_a_pin_over_the_budget(checkpoint: Checkpoint) -> None:
    async with serving(AsyncLLM(**checkpoint.options, max_pinned_blocks=4)) as client:
        await post(client, PINS, prompt=[5] * 40)
        error = await refused(await client.post(PINS, json={"prompt": [6] * 40}), 400)
        assert error["message"] == (
            "the pin needs up to 3 more blocks of 16 tokens, but of the 4 that pins and sessions may have "
            "together (max_pinned_blocks) 3 are held and 0 promised, so 1 are left."
        )
        fields = {"prompt": [6] * 40, "session_id": "s", **GREEDY}
        error = await refused(await client.post(COMPLETIONS, json=fields), 400)
        assert "the session needs up to 3 more blocks" in error["message"]
        # What does not ask to be kept is served.
        await post(client, COMPLETIONS, prompt=[6] * 400, **GREEDY)


async def test_clients_that_leave_free_the_session(engine: AsyncLLM, client: TestClient) -> None:
    await post(client, COMPLETIONS, prompt=TEXT, session_id="s", **GREEDY)
    before = await answer_of(await client.get(f"{SESSIONS}/s"))
    append = {"prompt": " on", "session_id": "s", "append": True}
    for stream in (True, False):
        first = asyncio.create_task(client.post(COMPLETIONS, json=append | LONG | {"stream": stream}))
        while not engine.stats()["num_running"]:
            await asyncio.sleep(0.005)
        error = await refused(await client.post(COMPLETIONS, json=append | GREEDY), 409)
        assert error["code"] == "conflict"
        if stream:
            (await first).close()
        else:
            first.cancel()
        while engine.num_in_flight or engine.stats()["num_running"]:
            await asyncio.sleep(0.005)
        after = await answer_of(await client.get(f"{SESSIONS}/s"))
        assert (after["tokens"], after["blocks"]) == (before["tokens"], before["blocks"])
    await post(client, COMPLETIONS, **append, **GREEDY)


async def test_lookup(engine: AsyncLLM, client: TestClient) -> None:
    for fields in ({"prompt": TEXT}, {"messages": [USER]}):
        path = COMPLETIONS if "prompt" in fields else CHAT
        unknown = await post(client, LOOKUP, **fields)
        assert unknown == {
            "object": "cache.lookup",
            "prompt_tokens": unknown["prompt_tokens"],
            "cached_tokens": 0,
            "tiers": {"device": 0},
            "admissible": True,
            "reason": None,
            "blocks_needed": math.ceil(unknown["prompt_tokens"] / 16),
            "blocks_available": 2000,
        }
        await post(client, path, **fields, **GREEDY)
        before, stats = await engine.snapshot(), engine.stats()
        known = await post(client, LOOKUP, **fields)
        after = await engine.snapshot()
        assert all((before.pop("ref_counts") == after.pop("ref_counts")).tolist())
        assert (after, engine.stats()) == (before, stats)
        again = await post(client, path, **fields, **GREEDY)
        assert known["cached_tokens"] == cached(again) > 0
        assert known["prompt_tokens"] == again["usage"]["prompt_tokens"]
        assert (await post(client, LOOKUP, cache_salt="other", **fields))["cached_tokens"] == 0
        await post(client, "/v1/cache/reset")


async def test_a_tenant_resets_nothing_of_others(engine: AsyncLLM) -> None:
    keys = {"api_keys": ("operator", "tenant"), "tenant_keys": frozenset({"tenant"})}
    async with serving(engine, **keys, keeps_engine=True) as client:
        headers = {name: {"Authorization": f"Bearer {name}"} for name in keys["api_keys"]}
        await post(client, COMPLETIONS, headers["operator"], prompt=TEXT, **GREEDY)
        error = await refused(await client.post("/v1/cache/reset", headers=headers["tenant"]), 403)
        assert error["code"] == "insufficient_permissions"
        again = await post(client, COMPLETIONS, headers["operator"], prompt=TEXT, **GREEDY)
        assert cached(again) > 0
        await answer_of(await client.post("/v1/cache/reset", headers=headers["operator"]))
        again = await post(client, COMPLETIONS, headers["operator"], prompt=TEXT, **GREEDY)
        assert cached(again) == 0


async def test_a_reset_leaves_running_requests_alone(engine: AsyncLLM, client: TestClient) -> None:
    alone = await post(client, COMPLETIONS, prompt=TEXT, **GREEDY | {"max_tokens": 400})
    await post(client, PINS, prompt=TEXT)
    await post(client, COMPLETIONS, prompt=TEXT, session_id="s", **GREEDY)
    fields = {"prompt": TEXT, **GREEDY, "max_tokens": 400}
    running = asyncio.create_task(client.post(COMPLETIONS, json=fields))
    while not engine.stats()["num_running"]:
        await asyncio.sleep(0.005)
    counts = await answer_of(await client.post("/v1/cache/reset"))
    assert counts == {"object": "cache.reset", "blocks": counts["blocks"], "pins": 1, "sessions": 1}
    assert counts["blocks"] > 0
    body = await answer_of(await running)
    assert body["choices"] == alone["choices"]
    assert (await answer_of(await client.get(PINS)))["data"] == []
    assert (await answer_of(await client.get(f"{SESSIONS}/s")))["blocks"] == 0
    assert (await post(client, LOOKUP, prompt=TEXT))["cached_tokens"] == 0


async def test_tenants_see_their_own(engine: AsyncLLM, client: TestClient) -> None:
    pin = await post(client, PINS, prompt=TEXT, cache_salt="mine")
    by_header = await post(client, PINS, prompt=TEXT + "so", headers=TENANT)
    await post(client, COMPLETIONS, prompt=TEXT, session_id="s", cache_salt="mine", **GREEDY)
    await post(client, COMPLETIONS, prompt=TEXT + "so", session_id="s", **GREEDY)
    await post(client, COMPLETIONS, prompt=" x", session_id="s", append=True, headers=TENANT, **GREEDY)
    mine = await answer_of(await client.get(PINS, headers=TENANT))
    assert [one["id"] for one in mine["data"]] == [pin["id"], by_header["id"]]
    for headers in (None, {"x-cache-salt": "other"}):
        assert (await answer_of(await client.get(PINS, headers=headers)))["data"] == []
        await refused(await client.delete(f"{PINS}/{pin['id']}", headers=headers), 404)
    sizes = [
        (await answer_of(await client.get(f"{SESSIONS}/s", headers=headers)))["tokens"]
        for headers in (TENANT, None)
    ]
    assert sizes[0] > sizes[1]
    # What the body says counts before the header.
    fork = {"id": "t", "cache_salt": "mine"}
    await post(client, f"{SESSIONS}/s/fork", headers={"x-cache-salt": "other"}, **fork)
    await refused(await client.get(f"{SESSIONS}/t"), 404)
    await answer_of(await client.delete(f"{SESSIONS}/t", headers=TENANT))
    await answer_of(await client.delete(f"{SESSIONS}/s"))
    assert (await answer_of(await client.get(f"{SESSIONS}/s", headers=TENANT)))["tokens"] == sizes[0]
    assert (await post(client, LOOKUP, prompt=TEXT, headers=TENANT))["cached_tokens"] > 0
    error = await refused(await client.get(PINS, headers={"x-cache-salt": "x" * 1025}), 400)
    assert error["param"] == "x-cache-salt"
