"""The application of the ingress: the checks of a server on a network, probes, and the relay to the replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tide_serve.api_key_sources import api_keys
from tide_serve.cluster.metrics import by_replica
from tide_serve.cluster.relay import Relay
from tide_serve.config import ServeConfig
from tide_serve.logs import log_to_stderr
from tide_serve.observer import NoObserver, RequestObserver
from tide_serve.safety import guard
from tide_serve.server_metrics import ServerMetrics

_PROBE_S = 2.0
_GRACE_S = 10.0  # for an answer that ends at its own time limit


@dataclass
class Front:
    """What the checks need of a server that has no engine; Ray sends nothing to an ingress that it is about to end."""

    config: ServeConfig
    draining: bool = False
    metrics: ServerMetrics = field(default_factory=ServerMetrics)
    observer: RequestObserver = field(default_factory=NoObserver)


def ingress_builder(deployment: str, config: ServeConfig, api_key_file: Path | None = None) -> Callable[[], ASGIApp]:
    """What makes the application in the ingress' process.

    Args:
        deployment: of the replicas, in the same Ray application.
        api_key_file: on the ingress' machine. Keys are read there, so that they are in no configuration that Ray stores or shows.
    """

    def build() -> ASGIApp:  # a plain function, as Ray takes any other callable for the application itself
        log_to_stderr(config.log_text)
        keys = api_keys(api_key_file, config.api_keys)
        return ingress_app(serve.get_deployment_handle(deployment), replace(config, api_keys=keys))

    return build


def ingress_app(model: DeploymentHandle, config: ServeConfig) -> ASGIApp:
    """The application whose requests the replicas behind ``model`` answer."""
    front = Front(config)

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> PlainTextResponse:
        pages = await model.broadcast("metrics").results_async(timeout_s=_PROBE_S, return_exceptions=True)
        replicas = by_replica(page for page in pages if not isinstance(page, BaseException))
        return PlainTextResponse(replicas + front.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/ready", Relay(model, attempts=1, timeout=_PROBE_S)),
        Mount("/", Relay(model, timeout=config.request_timeout + _GRACE_S)),
    ]
    return _without_request_id(guard(Starlette(routes=routes), front))


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
