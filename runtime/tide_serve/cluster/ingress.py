"""The application of the ingress: the checks of a server on a network, probes, and the relay to the replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tide_serve.cluster.relay import Relay
from tide_serve.config import ServeConfig, api_keys
from tide_serve.http.middlewares import guard
from tide_serve.observe.logs import log_to_stderr
from tide_serve.observe.request_record import ServerState

_PROBE_S = 2.0
_GRACE_S = 10.0  # for an answer that ends at its own time limit


def ingress_builder(deployment: str, config: ServeConfig, api_key_file: Path | None = None) -> Callable[[], ASGIApp]:
    """What makes the application in the ingress' process.

    Args:
        deployment: the name of the replicas' deployment in the same Ray application.
        api_key_file: on the ingress' machine. Keys are read there, so that they are in no configuration that Ray stores or shows.
    """

    def build() -> ASGIApp:  # a plain function, as Ray takes any other callable for the application itself
        log_to_stderr(config.log_text)
        keys = api_keys(api_key_file, config.api_keys)
        return ingress_app(serve.get_deployment_handle(deployment), replace(config, api_keys=keys))

    return build


def ingress_app(model: DeploymentHandle, config: ServeConfig) -> ASGIApp:
    """The application whose requests the replicas of ``model`` answer."""
    state = ServerState(config)  # never draining: Ray sends nothing to an ingress that it is about to end

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> PlainTextResponse:
        pages = await model.broadcast("metrics").results_async(timeout_s=_PROBE_S, return_exceptions=True)
        replicas = by_replica(page for page in pages if not isinstance(page, BaseException))
        return PlainTextResponse(replicas + state.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/ready", Relay(model, attempts=1, timeout=_PROBE_S)),
        Mount("/", Relay(model, timeout=config.request_timeout + _GRACE_S)),
    ]
    return _without_request_id(guard(Starlette(routes=routes), state))


def _without_request_id(app: ASGIApp) -> ASGIApp:
    """Ray's proxy gives every request its id and adds this header to the answer; clients would read it twice."""

    async def without(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_rest(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name.lower() != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_rest)

    return without


def by_replica(pages: Iterable[tuple[str, str]]) -> str:
    """The metrics of all replicas in the Prometheus text format, each with its ``replica`` as a label.

    Args:
        pages: a replica's name, and its metrics in the same format.
    """
    families: dict[str, Metric] = {}
    for replica, page in pages:
        for family in text_string_to_metric_families(page):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry).decode()


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
