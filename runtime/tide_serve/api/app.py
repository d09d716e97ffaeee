"""The ASGI application: routes, error objects, and the chat page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import APIRouter, FastAPI, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from tide_runtime import Engine, TideError

from tide_serve.api.openapi import openapi_routes
from tide_serve.api.routes import post_routes
from tide_serve.api.service import HoldModels, Service
from tide_serve.api.status import health_routes, models_routes
from tide_serve.config import ServeConfig
from tide_serve.errors import ApiError, answer_error
from tide_serve.models.registry import ModelRegistry, OneEngine

_PAGE_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts, styles, pictures and connections of this server only: the text of a model cannot load or send anything.
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def make_app(models: Engine | ModelRegistry, config: ServeConfig | None = None) -> FastAPI:
    """The application that serves an engine, or several models; it closes them when it shuts down.

    Raises ParamsError where ``config`` is wrong.
    """
    config = config or ServeConfig()
    service = Service(config, OneEngine(models, config.model_names) if isinstance(models, Engine) else models)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.models.close(abort=True)

    app = FastAPI(title=f"TIDE: {service.model_names[0]}", lifespan=lifespan, openapi_url=None)
    app.state.service = service
    app.add_middleware(HoldModels)
    for kind in (ApiError, TideError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer_error)
    for routes in (health_routes, models_routes, post_routes):
        app.include_router(routes(service))
    if service.config.page:
        app.include_router(page_routes())
    app.include_router(openapi_routes(app))
    return app


def page_routes() -> APIRouter:
    """``/`` and its files below ``/page``, which need no API key as they hold nothing of the model. They are read once, here."""
    folder = Path(__file__).parents[1] / "page"
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in _PAGE_TYPES}
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def page() -> Response:
        return await file("index.html")

    @router.get("/page/{name}")
    async def file(name: str) -> Response:
        if name not in files:
            raise ApiError(404, f"the page has no file {name!r}")
        return Response(files[name], headers=_PAGE_HEADERS, media_type=_PAGE_TYPES[Path(name).suffix])

    return router
