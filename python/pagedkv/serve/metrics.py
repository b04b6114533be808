"""What /metrics shows: vLLM's names after the prefix `pagedkv:`, so that its dashboards need one replacement.

Gauges and counters come from the engine's own statistics at the moment of the scrape, so nothing is counted
twice and an idle server does no work. Histograms are observed here, per request, from the times that the
engine noted: a client that reads slowly does not change them.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from pagedkv.outputs import RequestMetrics, SampleChange
from pagedkv.request import Request

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PREFIX: Final = "pagedkv:"
_LABELS: Final = ("model_name", "engine")
# One engine behind one address; the label is what dashboards group by.
_ENGINE: Final = "0"

Stats = Mapping[str, int]

# name after the prefix -> (name in the engine's statistics, or several that add up, help)
_GAUGES: Final = {
    "num_requests_running": ("num_running", "Sequences that take part in steps."),
    "num_requests_waiting": ("num_waiting", "Sequences that wait for room in a step or in the cache."),
    "kv_wasted_slots": ("wasted_slots", "Token slots of running sequences' blocks that hold no token."),
    "kv_blocks_pinned": ("blocks_pinned", "Of the used blocks, those that pins and sessions hold."),
    "kv_blocks_promised": ("blocks_promised", "Blocks set aside for pins and sessions that are being made."),
    "kv_blocks_pin_budget": ("blocks_pin_budget", "Blocks that pins and sessions may have together."),
    "num_pins": ("num_pins", "Pinned prompts."),
    "num_sessions": ("num_sessions", "Sessions that are kept."),
}
_COUNTERS: Final = {
    "prompt_tokens": ("prompt_tokens + prefix_hits", "Prompt tokens computed or found in the cache."),
    "prompt_tokens_cached": ("prefix_hits", "Prompt tokens whose keys and values were found in the cache."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
    "discarded_tokens": ("discarded_tokens", "Of those, tokens beyond a stop string, which no answer holds."),
    "void_rows": ("void_rows", "Rows sampled ahead for answers that ended in the step before."),
    "prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache."),
    "num_preemptions": ("preemptions", "Sequences that gave their blocks back before they were done."),
    "recomputed_tokens": ("recomputed_tokens", "Tokens computed once more after a preemption."),
    "kv_block_evictions": ("evictions", "Idle blocks whose content was given up for a new one."),
    "kv_block_copies": ("copies", "Blocks copied before they were written to."),
    "engine_steps": ("steps", "Steps of the engine."),
    "scheduled_tokens": ("scheduled_tokens", "Tokens computed in steps."),
}
# Of every tenant that was named in the configuration, and of all others together: as many series as there are
# names, whatever salts and keys clients send. None of the two is ever shown.
_TENANT_GAUGES: Final = {
    "tenant_kv_blocks": ("blocks_cached", "Cache blocks with findable contents."),
}
_TENANT_COUNTERS: Final = {
    "tenant_requests": ("requests", "Requests."),
    "tenant_prefix_cache_queries": ("prefix_queries", "Prompt tokens looked up in the prefix cache."),
    "tenant_prefix_cache_hits": ("prefix_hits", "Prompt tokens found in the prefix cache."),
    "tenant_generation_tokens": ("generation_tokens", "Tokens generated."),
    "tenant_kv_block_evictions": ("evictions", "Idle blocks whose content was given up for a new one."),
}
_FINISHES: Final = ("stop", "length", "abort", "error")

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
_TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)
_SAMPLES: Final = (1, 2, 5, 10, 20, 50, 128)

_HISTOGRAMS: Final = {
    "time_to_first_token_seconds": ("From the arrival of a request to its first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of a sequence.", _SECONDS),
    "request_time_per_output_token_seconds": ("Mean time per token after the first, per request.", _SECONDS),
    "e2e_request_latency_seconds": ("From the arrival of a request to its last token.", _SECONDS),
    "request_queue_time_seconds": ("From the arrival to the step that gave the first token.", _SECONDS),
    "request_prefill_time_seconds": (
        "From the start of the step that gave the first token to that token.",
        _SECONDS,
    ),
    "request_decode_time_seconds": ("From the first token to the last one.", _SECONDS),
    "request_inference_time_seconds": (
        "From the start of the step that gave the first token to the last token.",
        _SECONDS,
    ),
    "request_prompt_tokens": ("Prompt tokens per request.", _TOKENS),
    "request_generation_tokens": ("Generated tokens per request, of all its sequences.", _TOKENS),
    "request_params_n": ("Sequences asked for per request.", _SAMPLES),
    "request_params_max_tokens": ("Tokens asked for per sequence at most.", _TOKENS),
}


class Metrics:
    """The registry of one server: a collector over the engine's statistics, and the histograms.

    Args:
        model_name: value of the label `model_name`.
        stats: gives the engine's counters; called at every scrape.
        cache_config: labels of the constant `cache_config_info`.

    Attributes:
        tenants: what named tenants did and have, by name; set before every exposition.
    """

    def __init__(self, model_name: str, stats: Callable[[], Stats], cache_config: Mapping[str, str]) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_EngineCollector(model_name, stats, cache_config))
        self.tenants: Mapping[str, Stats] = {}
        self._registry.register(_TenantCollector(model_name, lambda: self.tenants))
        self._histograms = {
            name: Histogram(PREFIX + name, text, _LABELS, buckets=buckets, registry=self._registry).labels(
                model_name, _ENGINE
            )
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        self._http_requests = Counter(
            "http_requests", "Responses by address.", ("handler", "method", "status"), registry=self._registry
        )

    def exposition(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)

    def observe(self, name: str, value: float) -> None:
        """Adds one observation to a histogram."""
        self._histograms[name].observe(value)

    def count_response(self, address: str, method: str, status: int) -> None:
        """Counts a response; `address` is a route's pattern, so callers cannot make up new time series."""
        self._http_requests.labels(address, method, f"{status // 100}xx").inc()


class Stopwatch:
    """Times one request.

    Every time is the engine's: how soon the client reads, and so how late the changes are seen here, changes
    nothing.
    """

    def __init__(self, metrics: Metrics, request: Request) -> None:
        self._metrics = metrics
        self._request = request
        self._num_going = request.params.n
        self._num_tokens: dict[int, int] = {}
        self._last_token_times: dict[int, float] = {}

    def saw(self, changes: Iterable[SampleChange], times: RequestMetrics) -> None:
        """Takes notice of what is new; `times` are the request's as of now."""
        observe = self._metrics.observe
        first = not self._num_tokens
        for change in changes:
            self._num_going -= change.finish_reason is not None
            num_new = len(change.token_ids)
            if not num_new:
                continue
            assert times.last_token_time is not None, "there is a token"
            before = self._num_tokens.get(change.index, 0)
            if before:
                # Several tokens can arrive together; each took its share of the time.
                each = (times.last_token_time - self._last_token_times[change.index]) / num_new
                for _ in range(num_new):
                    observe("inter_token_latency_seconds", each)
            self._num_tokens[change.index] = before + num_new
            self._last_token_times[change.index] = times.last_token_time
        if first and self._num_tokens and times.first_token_time is not None:
            observe("time_to_first_token_seconds", times.first_token_time - times.arrival_time)
        if not self._num_going:
            self._finish(times)

    def _finish(self, times: RequestMetrics) -> None:
        observe, request = self._metrics.observe, self._request
        finished = times.finished_time
        assert finished is not None, "all answers have ended"
        observe("e2e_request_latency_seconds", finished - times.arrival_time)
        observe("request_prompt_tokens", len(request.prompt_token_ids))
        observe("request_generation_tokens", sum(self._num_tokens.values()))
        observe("request_params_n", request.params.n)
        observe("request_params_max_tokens", request.max_tokens)
        if times.first_scheduled_time is None or times.first_token_time is None:
            return
        decode_time = finished - times.first_token_time
        observe("request_queue_time_seconds", times.first_scheduled_time - times.arrival_time)
        observe("request_prefill_time_seconds", times.first_token_time - times.first_scheduled_time)
        observe("request_decode_time_seconds", decode_time)
        observe("request_inference_time_seconds", finished - times.first_scheduled_time)
        longest = max(self._num_tokens.values(), default=0)
        if longest > 1:
            observe("request_time_per_output_token_seconds", decode_time / (longest - 1))


class _EngineCollector(Collector):
    """Turns the engine's statistics into metrics at the moment they are asked for."""

    def __init__(self, model_name: str, stats: Callable[[], Stats], cache_config: Mapping[str, str]) -> None:
        self._labels = [model_name, _ENGINE]
        self._stats = stats
        self._cache_config = cache_config

    def collect(self) -> Iterable[Metric]:
        """Called by the registry at every scrape."""
        stats = self._stats()
        for name, (source, text) in _GAUGES.items():
            yield self._gauge(name, text, stats[source])
        for name, (source, text) in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=_LABELS)
            counter.add_metric(self._labels, sum(stats[part] for part in source.split(" + ")))
            yield counter
        finished = CounterMetricFamily(
            PREFIX + "request_success",
            "Sequences that ended, by reason.",
            labels=[*_LABELS, "finished_reason"],
        )
        for reason in _FINISHES:
            finished.add_metric([*self._labels, reason], stats[f"finished_{reason}"])
        yield finished
        yield from self._blocks(stats)

    def _blocks(self, stats: Stats) -> Iterable[Metric]:
        """Used blocks are those that somebody holds and those that a step in flight may still touch."""
        used = stats["blocks_owned"] + stats["blocks_fenced"]
        blocks = GaugeMetricFamily(PREFIX + "kv_blocks", "Cache blocks by state.", labels=[*_LABELS, "state"])
        for state, count in (("used", used), ("idle", stats["blocks_idle"]), ("free", stats["blocks_free"])):
            blocks.add_metric([*self._labels, state], count)
        yield blocks
        share = used / stats["blocks_total"] if stats["blocks_total"] else 0.0
        yield self._gauge("kv_cache_usage_perc", "Share of the cache blocks in use, 0 to 1.", share)
        # Routers look for vLLM's name of the number of blocks, whatever device they are on.
        config = {**self._cache_config, "num_gpu_blocks": str(stats["blocks_total"])}
        info = GaugeMetricFamily(
            PREFIX + "cache_config_info", "The cache's configuration, as labels.", labels=[*_LABELS, *config]
        )
        info.add_metric([*self._labels, *config.values()], 1)
        yield info

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=_LABELS)
        gauge.add_metric(self._labels, value)
        return gauge


class _TenantCollector(Collector):
    """The metrics of named tenants; nothing where there are none."""

    def __init__(self, model_name: str, tenants: Callable[[], Mapping[str, Stats]]) -> None:
        self._labels = [model_name, _ENGINE]
        self._tenants = tenants

    def collect(self) -> Iterable[Metric]:
        """Called by the registry at every scrape."""
        tenants = self._tenants()
        labels = [*_LABELS, "tenant"]
        for names, kind in ((_TENANT_GAUGES, GaugeMetricFamily), (_TENANT_COUNTERS, CounterMetricFamily)):
            for name, (source, text) in names.items() if tenants else ():
                family = kind(PREFIX + name, text, labels=labels)
                for tenant, stats in tenants.items():
                    family.add_metric([*self._labels, tenant], stats[source])
                yield family
