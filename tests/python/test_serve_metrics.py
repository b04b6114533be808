"""/metrics and /health: names and labels that dashboards and routers look for."""

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from fake_engine import FakeEngine, serving
from pagedkv import SamplingParams
from pagedkv.outputs import RequestMetrics, SampleChange
from pagedkv.serve.metrics import Metrics, Stopwatch

LABELS = {"model_name": "mock", "engine": "0"}


async def samples_of(client: Any) -> dict[tuple[str, str], float]:
    """(name, the labels other than model and engine) -> value, of everything that /metrics shows."""
    response = await client.get("/metrics")
    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(await response.text()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("pagedkv:"):
                assert {name: labels.pop(name) for name in LABELS} == LABELS
            samples[sample.name, ",".join(f"{k}={v}" for k, v in sorted(labels.items()))] = sample.value
    return samples


async def test_state_of_the_cache() -> None:
    async with serving(FakeEngine()) as client:
        samples = await samples_of(client)
        states = {state: samples["pagedkv:kv_blocks", f"state={state}"] for state in ("used", "idle", "free")}
        assert states == {"used": 30, "idle": 10, "free": 60}
        assert samples["pagedkv:kv_cache_usage_perc", ""] == 0.3
        assert samples["pagedkv:kv_wasted_slots", ""] == 0
        assert samples["pagedkv:prefix_cache_queries_total", ""] == 7
        assert samples["pagedkv:prefix_cache_hits_total", ""] == 3
        for name in ("num_requests_running", "num_requests_waiting", "num_preemptions_total"):
            assert samples[f"pagedkv:{name}", ""] == 0
        info = "block_size=16,enable_prefix_caching=True,num_gpu_blocks=100"
        assert samples["pagedkv:cache_config_info", info] == 1
        reasons = ("stop", "length", "abort", "error")
        assert all(("pagedkv:request_success_total", f"finished_reason={r}") in samples for r in reasons)


async def test_requests_are_timed() -> None:
    async with serving(FakeEngine(step_s=0.01)) as client:
        fields = {"prompt": ["ab", "cd"], "n": 2, "max_tokens": 5}
        assert (await client.post("/v1/completions", json=fields)).status == 200
        fields = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, "stream": True}
        await (await client.post("/v1/chat/completions", json=fields)).read()
        assert (await client.post("/v1/completions", json={})).status == 400
        samples = await samples_of(client)

        def count(name: str) -> float:
            return samples[f"pagedkv:{name}_count", ""]

        def total(name: str) -> float:
            return samples[f"pagedkv:{name}_sum", ""]

        per_request = (
            "time_to_first_token_seconds",
            "e2e_request_latency_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_inference_time_seconds",
            "request_time_per_output_token_seconds",
            "request_params_n",
            "request_params_max_tokens",
        )
        assert {name: count(name) for name in per_request} == dict.fromkeys(per_request, 3)
        assert total("request_generation_tokens") == 2 * 2 * 5 + 5
        assert total("request_params_n") == 5
        assert count("inter_token_latency_seconds") == 5 * 4
        assert 0.01 <= total("time_to_first_token_seconds") / 3 < total("e2e_request_latency_seconds") / 3
        handled = "handler=/v1/completions,method=POST,status="
        assert samples["http_requests_total", handled + "2xx"] == 1
        assert samples["http_requests_total", handled + "4xx"] == 1


def test_times_are_the_engine_s() -> None:
    """Nothing of the hour at which the changes are read goes into the histograms."""
    metrics = Metrics("mock", dict, {})
    observed: dict[str, list[float]] = {}
    metrics.observe = lambda name, value: observed.setdefault(name, []).append(value)  # type: ignore[method-assign]
    stopwatch = Stopwatch(metrics, FakeEngine().prepare([1, 2], SamplingParams(n=2, max_tokens=4)))
    times = RequestMetrics(arrival_time=100.0, first_scheduled_time=101.0, first_token_time=103.0)
    times.last_token_time = 103.0
    stopwatch.saw([SampleChange(0, "a", [5]), SampleChange(1, "b", [6])], times)
    assert observed == {"time_to_first_token_seconds": [3.0]}
    # Three steps that the reader missed come as one change.
    times.last_token_time = times.finished_time = 109.0
    stopwatch.saw(
        [SampleChange(0, "bcd", [6, 7, 8], None, "length"), SampleChange(1, "c", [7], None, "stop")], times
    )
    assert observed == {
        "time_to_first_token_seconds": [3.0],
        "inter_token_latency_seconds": [2.0, 2.0, 2.0, 6.0],
        "e2e_request_latency_seconds": [9.0],
        "request_prompt_tokens": [2],
        "request_generation_tokens": [6],
        "request_params_n": [2],
        "request_params_max_tokens": [4],
        "request_queue_time_seconds": [1.0],
        "request_prefill_time_seconds": [2.0],
        "request_decode_time_seconds": [6.0],
        "request_inference_time_seconds": [8.0],
        "request_time_per_output_token_seconds": [2.0],
    }


async def test_made_up_addresses_make_no_time_series() -> None:
    async with serving(FakeEngine()) as client:
        for index in range(5):
            await client.get(f"/made/up/{index}")
        samples = await samples_of(client)
        assert samples["http_requests_total", "handler=other,method=GET,status=4xx"] == 5


async def test_head_is_answered() -> None:
    async with serving(FakeEngine()) as client:
        response = await client.head("/metrics")
        assert response.status == 200


async def test_health_follows_the_engine() -> None:
    engine = FakeEngine()
    async with serving(engine) as client:
        assert (await client.get("/health")).status == 200
        engine.heartbeat_age = 1000.0
        response = await client.get("/health")
        assert response.status == 503
        assert (await response.json())["status"] == "stalled"
        engine.heartbeat_age, engine.dead = 0.0, True
        response = await client.get("/health")
        assert response.status == 503
        assert (await response.json())["status"] == "dead"
