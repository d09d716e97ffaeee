"""``/health``, ``/ready`` and ``/metrics``, for whatever watches the server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from tide_serve.service import Service

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 while the engine works; after that only a restart helps."""
    return _state(None if _service(request).engine.healthy else "the engine has failed or is closed; its log says why")


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """200 while new requests are taken; 503 tells a load balancer to send them elsewhere for now."""
    return _state(obstacle(_service(request)))


@router.get("/metrics")
async def metrics(request: Request) -> PlainTextResponse:
    """Metrics of the engine and of the HTTP side in the Prometheus text format."""
    service = _service(request)
    return PlainTextResponse(service.engine.metrics() + service.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def obstacle(service: Service) -> str | None:
    """Why new requests would be refused; None: they are taken."""
    if service.draining:
        return "the server is ending"
    if not service.engine.healthy:
        return "the engine has failed or is closed"
    waiting, most = service.engine.stats().waiting, service.engine.options.max_queue
    return f"the queue is full: {waiting} requests wait" if waiting >= most else None


def _state(problem: str | None) -> JSONResponse:
    content: dict[str, Any] = {"status": "ok"} if problem is None else {"status": "unavailable", "reason": problem}
    return JSONResponse(content, 200 if problem is None else 503)


def _service(request: Request) -> Service:
    return request.app.state.service
