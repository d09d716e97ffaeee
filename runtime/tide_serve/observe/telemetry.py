"""Traces for OpenTelemetry: a span for each request, and in it spans of each generation.

Needs the extra ``tracing``; nothing else imports this module.
"""

from __future__ import annotations

import os
from time import time_ns

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue
from tide_runtime import Generation, RequestStats

from tide_serve.observe.request_record import RequestObserver, RequestRecord


class TracingObserver(RequestObserver):
    """Reports requests as spans.

    A request's span continues the trace of its W3C header ``traceparent``. Inside it each generation has the spans ``queue``,
    ``prefill`` and ``decode``, the last one with what depth did: ``tide.layers_per_token``, ``tide.drafted`` and
    ``tide.accepted``, ``tide.policy``. No span holds text.

    Args:
        provider: makes the spans and exports them.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tide_serve")
        self._incoming = TraceContextTextMapPropagator()
        self._spans: dict[RequestRecord, Span] = {}

    @classmethod
    def over_otlp(cls) -> TracingObserver:
        """Export over OTLP and HTTP, as the variables ``OTEL_EXPORTER_OTLP_…`` and ``OTEL_SERVICE_NAME`` say."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        name = os.environ.get("OTEL_SERVICE_NAME", "tide-serve")
        provider = TracerProvider(resource=Resource.create({"service.name": name}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        return cls(provider)

    def began(self, record: RequestRecord) -> None:
        self._spans[record] = self._tracer.start_span(
            f"{record.method} {record.path}",
            context=self._incoming.extract(record.trace_headers),
            kind=SpanKind.SERVER,
            start_time=record.began_ns,
            attributes={"http.request.method": record.method, "url.path": record.path, "tide.request_id": record.id},
        )

    def generated(self, record: RequestRecord, generation: Generation) -> None:
        """Spans from the generation's own times, back from now: this is called as soon as a result is there."""
        parent = self._spans.get(record)
        if parent is None:  # it has outlived its request, whose client left
            return
        context, (submitted, began, first_token, ended) = set_span_in_context(parent), _times(generation.stats, time_ns())
        self._tracer.start_span("queue", context, start_time=submitted).end(began)
        self._tracer.start_span("prefill", context, attributes=_prompt(generation.stats), start_time=began).end(first_token)
        self._tracer.start_span("decode", context, attributes=_output(generation), start_time=first_token).end(ended)

    def ended(self, record: RequestRecord) -> None:
        span = self._spans.pop(record)
        span.update_name(f"{record.method} {record.route}")
        span.set_attributes(
            {
                "http.route": record.route,
                "http.response.status_code": record.status,
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.output_tokens": record.output_tokens,
                "tide.aborted": record.aborted,
            }
        )
        if record.model is not None:
            span.set_attribute("gen_ai.request.model", record.model)
        if record.status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()

    def close(self) -> None:
        """Send what has not been sent yet."""
        self._provider.shutdown()


def _times(stats: RequestStats, ended: int) -> tuple[int, int, int, int]:
    """When a generation that ``ended`` was submitted, left the queue, and had its first token: Unix times in nanoseconds."""
    first_token = ended - _ns(stats.decode_time)
    submitted = first_token - _ns(stats.time_to_first_token)
    return submitted, submitted + _ns(stats.queue_time), first_token, ended


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


def _prompt(stats: RequestStats) -> dict[str, int]:
    return {
        "gen_ai.usage.input_tokens": stats.prompt_tokens,
        "tide.prefix_tokens": stats.prefix_tokens,
        "tide.preemptions": stats.preemptions,
    }


def _output(generation: Generation) -> dict[str, AttributeValue]:
    stats = generation.stats
    return {
        "gen_ai.usage.output_tokens": stats.new_tokens,
        "gen_ai.response.finish_reasons": (generation.finish_reason,),
        "tide.policy": stats.policy,
        "tide.layers_per_token": stats.layers_per_token,
        "tide.drafted": sum(stats.drafted.values()),
        "tide.accepted": sum(stats.accepted.values()),
        "tide.forced": stats.forced,
        "tide.uncovered": stats.uncovered,
    }
