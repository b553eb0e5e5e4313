"""Prometheus metrics of the HTTP side. The engine's own numbers are read from its client at each scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_INTERVALS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
# What the engine counts (treadle.engine.engine.EngineStats and its client's restarts)
_ENGINE = {
    "running": "Requests in the batch.",
    "queued": "Requests waiting for a place in the batch.",
    "kv_blocks": "Blocks of the KV cache, 32 tokens each.",
    "kv_blocks_held": "KV blocks held by running requests.",
    "kv_blocks_cached": "KV blocks kept only for reuse by later prompts.",
    "requests_total": "Requests taken from the server.",
    "preemptions_total": "Requests put back into the queue because the KV cache was full.",
    "prompt_tokens_total": "Prompt tokens of ended requests.",
    "cached_tokens_total": "Prompt tokens of ended requests that were found in the prefix cache.",
    "output_tokens_total": "Tokens of answers.",
    "steps_total": "Runs of the model.",
    "step_seconds_total": "Seconds spent in runs of the model.",
    "step_tokens_total": "Tokens computed: of prompts, of answers, guesses, and what was computed again.",
    "drafted_tokens_total": "Guessed tokens that the model has checked.",
    "accepted_tokens_total": "Guessed tokens that came true.",
    "model_drafted_tokens_total": "Of the guessed tokens that were checked, those of the draft model.",
    "model_accepted_tokens_total": "Of the guessed tokens that came true, those of the draft model.",
    "model_draft_seconds_total": "Seconds that the draft model has taken, between the runs of the model.",
    "read_bytes_total": "Bytes that steps had to read: weights, and the KV of each sequence, once.",
    "read_bytes_per_second": "The same in the newest steps, per second of them.",
    "read_limit_bytes_per_second": "What this machine can read, measured when the engine started.",
    "read_share": "Reading in the newest steps as a share of that limit.",
    "restarts_total": "Starts of the engine process after it had died.",
    "loaded": "Whether the model is in memory and answers: 1, or 0.",
}

# The time at which each counter was made: one more series each, of no use here.
disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """Counters and histograms in a registry of their own, so that two servers in one process do not meet."""

    def __init__(self, engine_stats: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        """``engine_stats``: by the name of the model."""
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "treadle_http_requests", "Finished HTTP requests.", ["route", "status"], registry=self.registry
        )
        self.running = Gauge(
            "treadle_requests_running", "Generation requests being answered, queued ones included.",
            registry=self.registry,
        )  # fmt: skip
        tokens = Counter("treadle_tokens", "Tokens by kind.", ["kind"], registry=self.registry)
        self.prompt_tokens = tokens.labels("prompt")
        self.cached_tokens = tokens.labels("cached")
        self.completion_tokens = tokens.labels("completion")
        self.ttft = Histogram(
            "treadle_ttft_seconds", "Time to first token.", buckets=_SECONDS, registry=self.registry
        )
        self.itl = Histogram(
            "treadle_itl_seconds", "Inter-token latency.", buckets=_INTERVALS, registry=self.registry
        )
        self.e2e = Histogram(
            "treadle_e2e_seconds", "Whole generation request.", buckets=_SECONDS, registry=self.registry
        )
        self.registry.register(_EngineStats(engine_stats))

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def clock(self) -> Clock:
        """Start measuring one generation request."""
        return Clock(self)


class Clock:
    """Times of one generation request: call ``tokens`` for each output, use it as a context manager around
    it."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = time.perf_counter()
        self._last: dict[int, float] = {}  # when each choice got its last output

    def __enter__(self) -> Clock:
        self._metrics.running.inc()
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.running.dec()
        self._metrics.e2e.observe(time.perf_counter() - self._start)

    def tokens(self, choice: int) -> None:
        """One output of this choice arrived."""
        now = time.perf_counter()
        if choice in self._last:
            self._metrics.itl.observe(now - self._last[choice])
        else:
            self._metrics.ttft.observe(now - self._start)
        self._last[choice] = now


class _EngineStats(Collector):
    def __init__(self, stats: Callable[[], Mapping[str, Mapping[str, float]]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for model, stats in self._stats().items():
            for name, value in stats.items():
                if name not in families:
                    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                    families[name] = kind(f"treadle_engine_{name}", _ENGINE[name], labels=["model"])
                families[name].add_metric([model], value)
        yield from families.values()
