"""Metrics of several models: what their engines count, with the model's name as a label, and how often they are loaded."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from tide_runtime import Engine

from tide_serve.observe.metric_pages import merged_pages


class PoolMetrics:
    """Counts go on where a model is loaded again; what says how it is now goes with its engine."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self._ended: dict[str, str] = {}  # by model: counts of its engines that are closed
        # The library adds _total to the names of counters.
        self._loads = Counter("tide_model_loads", "Times that a model was loaded.", ["model"], registry=registry)
        self._seconds = Counter(
            "tide_model_load_seconds", "Time of the loads, waiting for room included.", ["model"], registry=registry
        )
        self._failures = Counter("tide_model_load_failures", "Loads that failed.", ["model"], registry=registry)
        self._bytes = Gauge("tide_model_bytes", "Bytes of the memory's limit that a model holds.", ["model"], registry=registry)

    def loaded(self, model: str, size: int, seconds: float) -> None:
        self._loads.labels(model).inc()
        self._seconds.labels(model).inc(seconds)
        self._bytes.labels(model).set(size)

    def failed(self, model: str) -> None:
        self._failures.labels(model).inc()

    def unloaded(self, model: str, engine: Engine) -> None:
        """Keep what ``engine``, which is about to be closed, has counted."""
        pages: list[tuple[dict[str, str], str]] = [({}, self._ended.get(model, "")), ({}, engine.metrics())]
        self._ended[model] = merged_pages(pages, counts_only=True)
        self._bytes.labels(model).set(0)

    def text(self, engines: Mapping[str, Engine]) -> str:
        """Everything in the Prometheus text format. ``engines``: those that are loaded, by model."""
        now = [({"model": model}, engine.metrics()) for model, engine in engines.items()]
        before = [({"model": model}, page) for model, page in self._ended.items()]
        return merged_pages([*now, *before]) + generate_latest(self._registry).decode()
