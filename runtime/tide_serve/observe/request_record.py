"""What the server notes of each HTTP request: its record, its line in the log, its metrics, and hooks for other reports."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import perf_counter, time_ns
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from tide_runtime import Generation

from tide_serve.config import ServeConfig

_access = logging.getLogger("tide_serve.access")
_PATH_CHARS = 200
_SECONDS = (0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(eq=False)
class RequestRecord:
    """One HTTP request, from its headers to the end of its answer.

    Args:
        id: the request's id, as in the header ``X-Request-Id``.
        began_ns, began: Unix time in nanoseconds, and `perf_counter` seconds.
        trace_headers: the W3C headers ``traceparent`` and ``tracestate`` where the client sent them.
        client: the key's id (a hash), or the client's address where no key is needed.
        model: the name in the request; None: it names none that is served.
        route: the declared path that answered; "none" where none did.
        status: the answer's status; 499 where the request ended before it began; 0 as long as it has not begun.
        refused: why the request was refused before it reached a route, in one word; None: it was not.
        param, reason: the field that a refused request was refused for, if it was one, and why.
        no_effect: fields that were accepted and change nothing here.
        aborted: the answer was not completed: the client left, or the server failed or ended.
        cached_tokens: of the prompts, those that were not computed again.
        first_token_s, tokens_per_second: of the answer's generations, the longest time to a first token, and all speeds together.
        headers: added to the answer.
        request_text, output_texts: only with ``ServeConfig.log_text``.
    """

    id: str
    method: str
    path: str
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    began_ns: int = field(default_factory=time_ns)
    began: float = field(default_factory=perf_counter)
    client: str | None = None
    model: str | None = None
    route: str = "none"
    status: int = 0
    refused: str | None = None
    param: str | None = None
    reason: str | None = None
    no_effect: list[str] = field(default_factory=list)
    aborted: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float = 0.0
    tokens_per_second: float = 0.0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    request_text: str | None = None
    output_texts: list[str] = field(default_factory=list)

    def log(self, level: int) -> None:
        """Write the request, which has ended, as a line of JSON to the logger ``tide_serve.access``, and as ``request``, a dict.

        It holds neither keys nor, without ``ServeConfig.log_text``, texts.
        """
        if _access.isEnabledFor(level):
            fields = self._fields()
            _access.log(level, "%s", json.dumps(fields), extra={"request": fields})

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(self.began_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
            "id": self.id,
            "method": self.method,
            "path": self.path[:_PATH_CHARS],
            "status": self.status,
            "ms": round(1e3 * (perf_counter() - self.began), 1),
            "client": self.client,
        }
        notes = {
            "refused": self.refused,
            "field": self.param,
            "reason": self.reason,
            "no_effect": list(dict.fromkeys(self.no_effect)) or None,
            "aborted": self.aborted or None,
            "model": self.model,
        }
        fields |= {name: note for name, note in notes.items() if note is not None}
        if self.prompt_tokens:
            fields |= {
                "prompt_tokens": self.prompt_tokens,
                "cached_tokens": self.cached_tokens,
                "output_tokens": self.output_tokens,
                "first_token_ms": round(1e3 * self.first_token_s, 1),
                "tokens_per_second": round(self.tokens_per_second, 1),
            }
        if self.request_text is not None:
            fields |= {"request": self.request_text, "outputs": self.output_texts}
        return fields


# The request that the running task answers; tasks that it starts inherit it.
current_record: ContextVar[RequestRecord | None] = ContextVar("current_record", default=None)


def note_no_effect(*fields: str) -> None:
    """Let the log line of the request that runs name ``fields``, which were accepted and change nothing here."""
    if (record := current_record.get()) is not None:
        record.no_effect += fields


class RequestObserver:
    """Reports nothing; children report requests elsewhere, such as in traces.

    Called in the event loop's thread, so every hook must return at once. Probes (``/health``, …) are left out.
    """

    def began(self, record: RequestRecord) -> None:
        """A request's headers have come."""

    def generated(self, record: RequestRecord, generation: Generation) -> None:
        """One of the request's generations has ended."""

    def ended(self, record: RequestRecord) -> None:
        """The answer is complete, or was aborted."""

    def close(self) -> None:
        """The server ends."""


class ServerMetrics:
    """Prometheus metrics of the HTTP side; the engine has its own (`Engine.metrics`).

    They are in a registry of their own, so that several applications of a process do not mix.

    ``in_progress``: requests that are being answered, health checks and metrics left out.
    """

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.in_progress = 0
        # The library adds _total to the names of counters.
        self._requests = Counter("tide_http_requests", "Answered requests.", ["route", "status"], registry=registry)
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


@dataclass
class ServerState:
    """What the middlewares need of a server, with or without an engine.

    Args:
        draining: SIGTERM has come; new requests are refused.
        observer: requests are reported to it, in addition to the log and the metrics.
    """

    config: ServeConfig
    draining: bool = field(default=False, kw_only=True)
    metrics: ServerMetrics = field(default_factory=ServerMetrics, kw_only=True)
    observer: RequestObserver = field(default_factory=RequestObserver, kw_only=True)
