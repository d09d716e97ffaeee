"""GET /v1/models and /v1/models/{name}. All names are those of the one model; ``max_model_len`` is its context in tokens."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from openai.types import Model

from tide_serve.service import Service


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
    return {**model, "max_model_len": service.engine.manifest.max_seq_len}
