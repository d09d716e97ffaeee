"""Traces, kept in memory instead of being sent."""

from collections.abc import Callable

import pytest
from fastapi import FastAPI
from serve.http.stub_server import call, stub_service
from starlette.types import ASGIApp
from tide_runtime import Generation, RequestStats
from tide_serve.api.service import Service
from tide_serve.http.middlewares import guard

pytest.importorskip("opentelemetry.sdk", reason="the extra tracing")
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tide_serve.observe.telemetry import TracingObserver

STATS = RequestStats(
    prompt_tokens=7,
    new_tokens=5,
    time_to_first_token=0.5,
    queue_time=0.2,
    decode_time=2.0,
    layers_per_token=3.5,
    policy="exact",
    drafted={"router": 4, "ngram": 2},
    accepted={"router": 3},
)
GENERATION = Generation("secret answer", (1, 2, 3, 4, 5), "length", (), STATS)


@pytest.fixture
def traced() -> tuple[ASGIApp, Service, InMemorySpanExporter]:
    """An application whose route generates twice, and the spans it reports."""
    exporter, provider, service = InMemorySpanExporter(), TracerProvider(), stub_service()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    service.observer = TracingObserver(provider)
    app = FastAPI()

    @app.post("/v1/generate/{name}")
    async def generate(name: str) -> None:
        for _ in range(2):
            service.generated(GENERATION)

    @app.get("/health")
    async def health() -> None: ...

    return guard(app, service), service, exporter


Traced = tuple[ASGIApp, Service, InMemorySpanExporter]


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None and span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def test_request_has_spans_of_each_generation(traced: Traced) -> None:
    """Breaks: a trace does not show where a slow request spent its time, or what depth saved."""
    assert call(traced[0], "POST", "/v1/generate/x", json={"prompt": "secret prompt"}).status_code == 200
    *parts, request = traced[2].get_finished_spans()
    assert [span.name for span in parts] == ["queue", "prefill", "decode"] * 2
    assert all(span.parent is not None and span.parent.span_id == request.context.span_id for span in parts)
    assert [round(seconds(span), 3) for span in parts] == [0.2, 0.3, 2.0] * 2
    assert (parts[0].end_time, parts[1].end_time) == (parts[1].start_time, parts[2].start_time)
    decode = parts[2].attributes or {}
    assert (decode["tide.layers_per_token"], decode["tide.policy"]) == (3.5, "exact")
    assert (decode["tide.drafted"], decode["tide.accepted"], decode["gen_ai.usage.output_tokens"]) == (6, 3, 5)
    about = request.attributes or {}
    assert request.name == "POST /v1/generate/{name}" and about["http.response.status_code"] == 200
    assert (about["gen_ai.usage.input_tokens"], about["gen_ai.usage.output_tokens"]) == (14, 10)
    assert "secret" not in "".join(span.to_json() for span in (*parts, request))


def test_request_continues_the_trace_of_its_client(traced: Traced) -> None:
    """Breaks: the server's spans are not found in the trace of the application that called it."""
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    call(traced[0], "POST", "/v1/generate/x", headers={"traceparent": f"00-{trace}-{parent}-01"})
    request = traced[2].get_finished_spans()[-1]
    assert request.parent is not None
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (trace, parent)


@pytest.mark.parametrize("header", ["", "garbage", "00-0-0-00"])
def test_broken_trace_headers_do_no_harm(traced: Traced, header: str) -> None:
    """Breaks: a client's broken tracing fails its requests."""
    assert call(traced[0], "POST", "/v1/generate/x", headers={"traceparent": header}).status_code == 200
    assert traced[2].get_finished_spans()[-1].parent is None


def test_generations_that_outlive_their_request_are_left_out(traced: Traced) -> None:
    """Breaks: memory grows with every client that hangs up."""
    app, service, exporter = traced
    later: list[Callable[[], None]] = []
    observer = service.observer
    ended = observer.ended

    def end(record):  # type: ignore[no-untyped-def]
        ended(record)
        later.append(lambda: observer.generated(record, GENERATION))

    observer.ended = end  # type: ignore[method-assign]
    call(app, "POST", "/v1/generate/x")
    count = len(exporter.get_finished_spans())
    later[0]()
    assert len(exporter.get_finished_spans()) == count
