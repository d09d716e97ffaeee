"""``/health``, ``/ready`` and ``/metrics`` for whatever watches the server, and /v1/models for clients.

/v1/models has the form of OpenAI's API, or of Anthropic's for its clients. ``max_model_len`` of /v1/models is a model's
context in tokens; of a server with one model all names are its own.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from openai.types import Model
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tide_serve.api.service import Service
from tide_serve.errors import is_anthropic


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
    async def models(request: Request) -> dict[str, Any]:
        data = [_model(service, name, request) for name in service.model_names]
        if not is_anthropic(request.scope):
            return {"object": "list", "data": data}
        return {"data": data, "first_id": data[0]["id"], "last_id": data[-1]["id"], "has_more": False}

    @router.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service, name, request)

    return router


def _model(service: Service, name: str, request: Request) -> dict[str, Any]:
    if is_anthropic(request.scope):
        created = datetime.fromtimestamp(service.started, UTC).isoformat()
        return {"type": "model", "id": name, "display_name": name, "created_at": created, **service.models.described(name)}
    model = Model(id=name, object="model", created=service.started, owned_by="tide").model_dump()
    return {**model, **service.models.described(name)}
