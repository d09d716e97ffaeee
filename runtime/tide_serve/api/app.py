"""The ASGI application: routes, error objects, and what wraps them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from tide_runtime import Engine, TideError

from tide_serve.api.chat import chat_routes
from tide_serve.api.chat_page import page_routes
from tide_serve.api.completions import completions_routes
from tide_serve.api.openapi import openapi_routes
from tide_serve.api.responses import responses_routes
from tide_serve.api.service import Service
from tide_serve.api.status import health_routes, models_routes
from tide_serve.api.tokenize import tokenize_routes
from tide_serve.config import ServeConfig
from tide_serve.errors import ApiError, answer_error


def make_app(engine: Engine, config: ServeConfig | None = None) -> FastAPI:
    """The application that serves ``engine``; it closes the engine when it shuts down.

    Raises ParamsError where ``config`` is wrong.
    """
    service = Service(config or ServeConfig(), engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close(abort=True)

    app = FastAPI(title=f"TIDE: {service.model_names[0]}", lifespan=lifespan, openapi_url=None)
    app.state.service = service
    for kind in (ApiError, TideError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer_error)
    for routes in (health_routes, models_routes, chat_routes, completions_routes, responses_routes, tokenize_routes):
        app.include_router(routes(service))
    if service.config.page:
        app.include_router(page_routes())
    app.include_router(openapi_routes(app))
    return app
