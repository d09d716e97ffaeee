"""``/health``, ``/ready`` and ``/metrics`` for whatever watches the server, and /v1/models for clients.

``max_model_len`` of /v1/models is a model's context in tokens; of a server with one model all names are its own.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse
from openai.types import Model
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tide_serve.api.service import Service


def health_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> JSONResponse:
        """200 while the server works; after that only a restart helps."""
        return _state(service.models.failure())

    @router.get("/ready")
    async def ready() -> JSONResponse:
        """200 while new requests are accepted; 503 tells a load balancer to send them elsewhere for now."""
        return _state(_obstacle(service))

    @router.get("/metrics")
    async def metrics() -> PlainTextResponse:
        """Metrics of the engines and of the HTTP side in the Prometheus text format."""
        return PlainTextResponse(service.models.metrics() + service.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router


def _obstacle(service: Service) -> str | None:
    """Why new requests would be refused; None: they are accepted."""
    return "the server is ending" if service.draining else service.models.obstacle()


def _state(problem: str | None) -> JSONResponse:
    content: dict[str, Any] = {"status": "ok"} if problem is None else {"status": "unavailable", "reason": problem}
    return JSONResponse(content, 200 if problem is None else 503)


def models_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service, name) for name in service.model_names]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service, name)

    return router


def _model(service: Service, name: str) -> dict[str, Any]:
    model = Model(id=name, object="model", created=service.started, owned_by="tide").model_dump()
    return {**model, **service.models.described(name)}
