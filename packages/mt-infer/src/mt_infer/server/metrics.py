"""Counts and times for Prometheus, in vLLM's shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 40)
_NEXT = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960)
_COUNTS = {
    "mt:prefix_cache_queries": ("admitted_tokens", "Tokens looked up in the prefix cache"),
    "mt:prefix_cache_hits": ("prefix_tokens", "Tokens found in the prefix cache"),
    "mt:num_preemptions": ("evictions", "Requests that gave their blocks back"),
    "mt:spec_decode_num_draft_tokens": ("drafted", "Guessed tokens"),
    "mt:spec_decode_num_accepted_tokens": ("accepted", "Guessed tokens that stay"),
}


class _EngineCounts(Collector):
    """The engine's counts, from the last request for them."""

    def __init__(self) -> None:
        self.stats: Mapping[str, int] = {}
        self.step: int | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield the counts."""
        stats = self.stats
        used = stats.get("blocks", 0) - stats.get("free_blocks", 0)
        gauges = {
            "mt:num_requests_running": ("Requests in passes", stats.get("running", 0)),
            "mt:num_requests_waiting": ("Requests that wait for a pass", stats.get("waiting", 0)),
            "mt:kv_cache_usage_perc": (
                "Share of used blocks",
                used / max(1, stats.get("blocks", 0)),
            ),
            "mt:step": (
                "Step of the weights; -1 without one",
                -1 if self.step is None else self.step,
            ),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)
        for name, (key, text) in _COUNTS.items():
            yield CounterMetricFamily(name, text, value=stats.get(key, 0))


class Metrics:
    """The metrics of one server.

    Attributes:
        rejected: Number of refused requests, by reason.
        ended: Number of ended continuations, by reason.
        prompt_tokens: Tokens of prompts.
        generation_tokens: Tokens of continuations.
        first_s: Seconds to a continuation's first token.
        next_s: Seconds between deltas of a continuation.
        whole_s: Seconds to a request's end.
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._engine = _EngineCounts()
        registry.register(self._engine)
        self.rejected = Counter(
            "mt:requests_rejected", "Refused requests", ["reason"], registry=registry
        )
        self.ended = Counter(
            "mt:request_success", "Ended continuations", ["finished_reason"], registry=registry
        )
        self.prompt_tokens = Counter("mt:prompt_tokens", "Tokens of prompts", registry=registry)
        self.generation_tokens = Counter(
            "mt:generation_tokens", "Generated tokens", registry=registry
        )
        self.first_s = Histogram(
            "mt:time_to_first_token_seconds",
            "Time to the first token",
            buckets=_FIRST,
            registry=registry,
        )
        self.next_s = Histogram(
            "mt:inter_token_latency_seconds",
            "Time between tokens",
            buckets=_NEXT,
            registry=registry,
        )
        self.whole_s = Histogram(
            "mt:e2e_request_latency_seconds",
            "Time to a request's end",
            buckets=_WHOLE,
            registry=registry,
        )

    def text(self, stats: Mapping[str, int], step: int | None) -> bytes:
        """Return all metrics in Prometheus's format.

        Args:
            stats: The engine's counts.
            step: Step of the weights.
        """
        self._engine.stats, self._engine.step = stats, step
        return generate_latest(self._registry)
