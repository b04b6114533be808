"""Why did it miss? Every verdict, through Python and through HTTP, and who may ask."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp.test_utils import TestClient
from prometheus_client.parser import text_string_to_metric_families

from fake_engine import events_of, serving
from pagedkv import LLM, AsyncLLM, Explanation, InvalidRequest, SamplingParams
from tiny_llm import LONG, Checkpoint, async_engine, at_rest

COMPLETIONS, CHAT, EXPLAIN = "/v1/completions", "/v1/chat/completions", "/v1/cache/explain"
SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
PROMPT = [4 + (11 * idx) % 90 for idx in range(60)]


def explained(llm: LLM, prompt: list[int]) -> Explanation:
    output = llm.generate(prompt, SHORT, use_tqdm=False)[0]
    found = llm.explain(output.request_id)
    assert found is not None
    assert (found.prompt_tokens, found.cached_tokens) == (len(prompt), output.num_cached_tokens)
    return found


def test_hits_and_misses(checkpoint: Checkpoint) -> None:
    llm = LLM(**checkpoint.options)
    text = llm.tokenizer.decode
    first = explained(llm, PROMPT)
    assert (first.verdict, first.token_index, first.context.held) == ("never_seen", 0, None)
    again = explained(llm, PROMPT)
    assert (again.verdict, again.cached_tokens, again.evicted) == ("hit", 59, None)
    other = [*PROMPT[:41], 99, *PROMPT[42:]]
    diverged = explained(llm, other)
    assert (diverged.verdict, diverged.token_index, diverged.cached_tokens) == ("diverged", 41, 41)
    assert diverged.context.before == text(PROMPT[9:41], skip_special_tokens=False)
    assert diverged.context.held is not None
    assert diverged.context.held.startswith(text(PROMPT[41:48], skip_special_tokens=False))
    assert diverged.context.came == text(other[41:], skip_special_tokens=False)
    assert explained(llm, [50]).verdict == "bypassed"
    llm.reset_prefix_cache()
    reset = explained(llm, PROMPT)
    assert (reset.verdict, reset.cached_tokens) == ("evicted", 0)
    assert reset.evicted is not None
    assert reset.evicted.reason == "reset"
    assert llm.explain("no such request") is None


def test_other_weights_have_it(checkpoint: Checkpoint) -> None:
    llm = LLM(**checkpoint.options)
    explained(llm, PROMPT)
    llm.set_model_epoch(1)
    other = explained(llm, PROMPT)
    assert (other.verdict, other.token_index, other.cached_tokens) == ("other_epoch", 0, 0)
    assert (other.context.before, other.context.held) == ("", None)
    assert explained(llm, PROMPT).verdict == "hit"
    wrong: Any
    for wrong in (-1, 2**64, 1.5, "1", None, True):
        with pytest.raises(InvalidRequest, match=r"model_epoch is .*allowed: an integer in"):
            llm.set_model_epoch(wrong)
    assert explained(llm, PROMPT).verdict == "hit"


def test_evictions_have_a_reason_and_an_age(checkpoint: Checkpoint) -> None:
    llm = LLM(**checkpoint.options | {"num_blocks": 8, "max_model_len": 128})
    explained(llm, PROMPT)
    explained(llm, list(reversed(range(4, 124))))
    gone = explained(llm, PROMPT)
    assert gone.verdict == "evicted"
    assert gone.evicted is not None
    assert gone.evicted.reason == "capacity"
    assert 0 <= gone.evicted.age_s < 60


def test_without_a_cache_it_is_bypassed(checkpoint: Checkpoint) -> None:
    llm = LLM(**checkpoint.options, enable_prefix_caching=False)
    assert explained(llm, PROMPT).verdict == "bypassed"


def slow_steps(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has steps take so long that a request of many tokens still runs when the next one arrives."""
    runner = llm._thread._engine.runner
    launch = runner.launch

    def slow(*arguments: Any) -> Any:
        time.sleep(0.005)
        return launch(*arguments)

    monkeypatch.setattr(runner, "launch", slow)


async def test_what_runs_is_not_computed_yet(async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_steps(async_llm, monkeypatch)
    stream = async_llm.submit(PROMPT, LONG, "first")
    await anext(stream)
    async for _ in async_llm.generate(PROMPT, SHORT, "second"):
        pass
    stream.abort()
    found = await async_llm.explain("second")
    assert found is not None
    # The last block of the prompt is not full yet.
    assert (found.verdict, found.cached_tokens) == ("not_computed_yet", 48)


async def test_tenants_see_their_own(async_llm: AsyncLLM) -> None:
    prompt = PROMPT[::-1]
    for salt in (b"one", b"two"):
        async for _ in async_llm.generate(prompt, SHORT, "mine", salt=salt):
            pass
    one, two = [await async_llm.explain("mine", salt=salt) for salt in (b"one", b"two")]
    assert one is not None
    assert two is not None
    assert (one.verdict, two.verdict) == ("never_seen", "other_salt")
    assert two.context.held is None
    assert two.cached_tokens == 0
    assert await async_llm.explain("mine") is None
    # A request that still runs can be asked about as well.
    stream = async_llm.submit(prompt, LONG, "running", salt=b"one")
    await anext(stream)
    running = await async_llm.explain("running", salt=b"one")
    assert running is not None
    assert running.verdict == "hit"
    stream.abort()


@asynccontextmanager
async def served(checkpoint: Checkpoint, **options: Any) -> AsyncIterator[TestClient]:
    keys = options.pop("api_keys", ())
    async with async_engine(checkpoint, **options) as engine:
        async with serving(engine, api_keys=keys, keeps_engine=True) as client:
            yield client
        await at_rest(engine)


async def ask(client: TestClient, prompt: Any, **fields: Any) -> dict[str, Any]:
    headers = fields.pop("headers", {})
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True} | fields
    response = await client.post(COMPLETIONS, json=body, headers=headers)
    assert response.status == 200, await response.text()
    return dict(await response.json())


async def explain(client: TestClient, request_id: str, status: int = 200, **headers: str) -> dict[str, Any]:
    response = await client.get(f"{EXPLAIN}/{request_id}", headers=headers)
    body = await response.json()
    assert response.status == status, body
    return dict(body if status == 200 else body["error"])


async def test_verdicts_over_http(checkpoint: Checkpoint) -> None:
    async with served(checkpoint, num_blocks=16, max_model_len=256) as client:
        first = await ask(client, PROMPT)
        found = await explain(client, first["id"])
        assert [*found] == [
            "object",
            "id",
            "prompt_tokens",
            "cached_tokens",
            "verdict",
            "token_index",
            "context",
            "evicted",
        ]
        assert (found["object"], found["id"], found["verdict"]) == (
            "cache.explanation",
            first["id"],
            "never_seen",
        )
        again = await ask(client, PROMPT, explain_cache=True)
        assert again["cache_explanation"] == await explain(client, again["id"])
        assert again["cache_explanation"]["verdict"] == "hit"
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 59
        other = await ask(client, [*PROMPT[:41], 99, *PROMPT[42:]], explain_cache=True)
        found = other["cache_explanation"]
        assert (found["verdict"], found["token_index"]) == ("diverged", 41)
        assert found["context"]["before"]
        assert found["context"]["held"] != found["context"]["came"]
        salted = await ask(client, PROMPT, cache_salt="x", explain_cache=True)
        assert salted["cache_explanation"]["verdict"] == "other_salt"
        assert (await ask(client, [50], explain_cache=True))["cache_explanation"]["verdict"] == "bypassed"
        await ask(client, list(reversed(range(4, 240))))
        gone = (await ask(client, PROMPT, explain_cache=True))["cache_explanation"]
        assert gone["verdict"] == "evicted"
        assert gone["evicted"]["reason"] == "capacity"
        assert gone["evicted"]["age_s"] >= 0
        assert "cache_explanation" not in first


async def test_what_runs_is_not_computed_yet_over_http(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        async_engine(checkpoint, num_blocks=40, max_model_len=512) as engine,
        serving(engine, keeps_engine=True) as client,
    ):
        slow_steps(engine, monkeypatch)
        body = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
        running = await client.post(COMPLETIONS, json=body)
        await running.content.readline()
        second = await ask(client, PROMPT, explain_cache=True)
        assert second["cache_explanation"]["verdict"] == "not_computed_yet"
        assert second["cache_explanation"]["cached_tokens"] == 48
        running.close()
        await at_rest(engine)


async def test_streams_and_several_prompts(checkpoint: Checkpoint) -> None:
    async with served(checkpoint) as client:
        fields = {"max_tokens": 3, "temperature": 0, "stream": True, "explain_cache": True}
        chat = {"messages": [{"role": "user", "content": "the cat sat on"}]}
        for path, body in ((COMPLETIONS, {"prompt": PROMPT}), (CHAT, chat)):
            for verdict, usage in (("never_seen", False), ("hit", True)):
                options = {"stream_options": {"include_usage": True}} if usage else {}
                response = await client.post(path, json=body | fields | options)
                events = events_of(await response.read())
                assert all("cache_explanation" not in event for event in events[:-1])
                assert events[-1]["cache_explanation"]["verdict"] == verdict
                assert events[-1]["choices"] == []
                assert ("usage" in events[-1]) == usage
                assert (await explain(client, events[0]["id"]))["verdict"] == verdict
        two = await ask(client, [PROMPT, [88, 87, 86]], explain_cache=True)
        assert [one["verdict"] for one in two["cache_explanation"]] == ["hit", "never_seen"]
        assert (await explain(client, two["id"] + "?prompt=1"))["prompt_tokens"] == 3
        assert (await explain(client, two["id"] + "?prompt=2", 404))["code"] == "request_not_found"
        assert "prompt must be" in (await explain(client, two["id"] + "?prompt=x", 400))["message"]


async def test_ids_are_known_to_their_tenant_only(checkpoint: Checkpoint) -> None:
    async with served(checkpoint) as client:
        mine = await ask(client, PROMPT, cache_salt="mine", headers={"X-Request-Id": "call-7"})
        assert (await explain(client, mine["id"], **{"x-cache-salt": "mine"}))["cached_tokens"] == 0
        assert (await explain(client, "call-7", **{"x-cache-salt": "mine"}))["id"] == mine["id"]
        for headers in ({}, {"x-cache-salt": "yours"}):
            for name in (mine["id"], "call-7", "nothing"):
                error = await explain(client, name, 404, **headers)
                assert error["code"] == "request_not_found"
        refused = await explain(client, mine["id"], 400, **{"x-cache-salt": "x" * 1025})
        assert "x-cache-salt must have 1 to 1024 characters" in refused["message"]


@pytest.mark.parametrize("salt", ["", "k2", "\xff"])
async def test_keys_are_tenants(checkpoint: Checkpoint, salt: str) -> None:
    async with served(checkpoint, api_keys=("k1", "k2")) as client:
        cached = []
        for key, own in (("k1", salt), ("k2", salt), ("k1", salt), ("k1", "z"), ("k2", salt)):
            headers = {"Authorization": f"Bearer {key}"}
            fields = {"cache_salt": own} if own else {}
            reply = await ask(client, PROMPT, headers=headers, **fields)
            cached.append(reply["usage"]["prompt_tokens_details"]["cached_tokens"])
            if own:
                headers["x-cache-salt"] = own
            await explain(client, reply["id"], **headers)
            other = {**headers, "Authorization": f"Bearer {'k2' if key == 'k1' else 'k1'}"}
            await explain(client, reply["id"], 404, **other)
        assert cached == [0, 0, 59, 0, 59]


async def test_metrics_name_tenants_and_no_secret(checkpoint: Checkpoint) -> None:
    tenants = [{"name": "acme", "cache_salt": "s3cret", "min_blocks": 4}]
    async with served(checkpoint, tenants=tenants) as client:
        for salt in ("s3cret", "s3cret", "made-up-1", "made-up-2"):
            await ask(client, PROMPT, cache_salt=salt)
        text = await (await client.get("/metrics")).text()
    assert "s3cret" not in text
    assert "made-up" not in text
    samples = {
        (sample.name, sample.labels["tenant"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "tenant" in sample.labels
    }
    assert {tenant for _, tenant in samples} == {"acme", "other"}
    assert samples["pagedkv:tenant_requests_total", "acme"] == 2
    assert samples["pagedkv:tenant_requests_total", "other"] == 2
    assert samples["pagedkv:tenant_prefix_cache_hits_total", "acme"] == 59
    assert samples["pagedkv:tenant_prefix_cache_hits_total", "other"] == 0
    assert samples["pagedkv:tenant_kv_blocks", "acme"] == 4
