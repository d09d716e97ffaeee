"""Prometheus metrics of the HTTP side; the engine has its own (`Engine.metrics`)."""

from __future__ import annotations

from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from tide_serve.observer import RequestRecord

_SECONDS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


class ServerMetrics:
    """Counts of one application, in a registry of its own, so that several applications of a process do not mix.

    ``in_progress``: requests that are being answered, health checks and metrics left out.
    """

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.in_progress = 0
        self._requests = Counter(
            "tide_http_requests", "Answered requests.", ["route", "status"], registry=registry
        )  # the library adds _total
        self._seconds = Histogram(
            "tide_http_request_seconds", "From headers to the end of the answer.", ["route"], buckets=_SECONDS, registry=registry
        )
        self._refused = Counter(
            "tide_http_refused", "Requests refused before they reached a route.", ["reason"], registry=registry
        )
        self._aborted = Counter(
            "tide_http_aborted", "Requests whose answer was not completed, mostly because the client left.", registry=registry
        )
        gauge = Gauge("tide_http_requests_in_progress", "Requests that are being answered.", registry=registry)
        gauge.set_function(lambda: self.in_progress)
        ProcessCollector(registry=registry)

    def count(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self._requests.labels(record.route, str(record.status)).inc()
        self._seconds.labels(record.route).observe(perf_counter() - record.began)
        if record.refused is not None:
            self._refused.labels(record.refused).inc()
        if record.aborted:
            self._aborted.inc()

    def text(self) -> str:
        """Everything in the Prometheus text format."""
        return generate_latest(self._registry).decode()
