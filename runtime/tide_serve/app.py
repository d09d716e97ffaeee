"""The ASGI application: routes, error objects, and what wraps them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from tide_runtime import Engine, TideError

from tide_serve.chat import chat_routes
from tide_serve.completions import completions_routes
from tide_serve.config import ServeConfig
from tide_serve.errors import ApiError, answer_error
from tide_serve.health_routes import router as health_routes
from tide_serve.models import models_routes
from tide_serve.openapi import openapi_routes
from tide_serve.page import page_routes
from tide_serve.responses import responses_routes
from tide_serve.service import Service
from tide_serve.tokenize import tokenize_routes


def make_app(engine: Engine, config: ServeConfig | None = None) -> FastAPI:
    """The application that serves ``engine``; it closes the engine when it shuts down.

    Raises ParamsError where ``config`` is wrong.
    """
    service = Service(engine, config or ServeConfig())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close(abort=True)

    app = FastAPI(title=f"TIDE: {service.model_names[0]}", lifespan=lifespan, openapi_url=None)
    app.state.service = service
    for kind in (ApiError, TideError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer_error)
    app.include_router(health_routes)
    for routes in (models_routes, chat_routes, completions_routes, responses_routes, tokenize_routes):
        app.include_router(routes(service))
    if service.config.page:
        app.include_router(page_routes())
    app.include_router(openapi_routes(app))
    return app
