"""A server without a model: an engine that does nothing and routes that only wait, stream or count, behind the real checks.

`stub_process.py` runs it in a process of its own.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp
from tide_runtime import Engine
from tide_serve import ServeConfig
from tide_serve.api.service import Service
from tide_serve.api.status import health_routes
from tide_serve.errors import ApiError, answer_error
from tide_serve.http.middlewares import guard
from tide_serve.http.server import bound_socket, url_of, uvicorn_config
from tide_serve.models.registry import OneEngine

BLOCK = b"x" * 8192


@dataclass
class StubEngine:
    """As much of an engine as the server uses outside its routes for generation."""

    waiting: int = 0
    max_queue: int = 4
    healthy: bool = True
    closed: threading.Event = field(default_factory=threading.Event)
    step_time: float = 0.0
    chat_template: str | None = None
    tool_chat_template: str | None = None
    hangs: bool = False  # and so does what waits for its end
    adapters: dict[str, str] = field(default_factory=dict)

    @property
    def options(self) -> StubEngine:
        return self

    def stats(self) -> StubEngine:
        return self

    def metrics(self) -> str:
        return "tide_running 0\n"

    def close(self, abort: bool = False) -> None:
        self.healthy = False
        while self.hangs:
            time.sleep(1)
        self.closed.set()


def stub_service(config: ServeConfig | None = None) -> Service:
    """A service around a `StubEngine`."""
    config = config or ServeConfig(model_names=("stub",))
    return Service(config, OneEngine(cast(Engine, StubEngine()), config.model_names or ("stub",)))


@dataclass
class Seen:
    """What the routes have seen."""

    bodies: list[int] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)  # a stream's client has left
    begun: threading.Event = field(default_factory=threading.Event)  # a stream has begun


def stub_app(service: Service, seen: Seen) -> FastAPI:
    """Routes for the tests, not guarded yet."""
    app = FastAPI()
    app.state.service = service
    app.include_router(health_routes(service))
    for kind in (ApiError, Exception):
        app.add_exception_handler(kind, answer_error)

    @app.post("/v1/count")
    async def count(request: Request) -> JSONResponse:
        seen.bodies.append(len(await request.body()))
        return JSONResponse({"bytes": seen.bodies[-1]})

    @app.post("/v1/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(endless())

    async def endless() -> AsyncIterator[bytes]:
        seen.begun.set()
        try:
            while True:
                yield BLOCK
                await asyncio.sleep(0)
        finally:
            seen.left.set()

    @app.post("/v1/events")
    async def events(until: Path) -> StreamingResponse:
        """A stream that ends when the file ``until`` is there, with a last word."""
        return StreamingResponse(words(until))

    async def words(until: Path) -> AsyncIterator[str]:
        while not until.exists():
            yield "word "
            await asyncio.sleep(0.02)
        yield "end"

    @app.post("/v1/hang")
    async def hang() -> None:
        """The step that runs never ends."""
        cast(Any, service.models).engine.hangs = True

    @app.post("/v1/name")
    async def name() -> str:
        return service.model_names[0]

    @app.post("/v1/wait/{seconds}")
    async def wait(seconds: float, until: Path | None = None) -> dict[str, bool]:
        """Ends early when the engine is closed, as a generation does, and when the file ``until`` is there."""
        seen.begun.set()
        closed = cast(Any, service.models).engine.closed
        end = time.monotonic() + seconds
        while time.monotonic() < end and not closed.is_set() and not (until is not None and until.exists()):
            await asyncio.sleep(0.02)
        return {"cut_short": closed.is_set()}

    @app.post("/v1/fail")
    async def fail() -> None:
        raise RuntimeError("secret prompt text")

    return app


@dataclass(frozen=True)
class Stub:
    """A running server; ``address``: host and port."""

    url: str
    address: tuple[str, int]
    service: Service
    seen: Seen

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=30)

    def eventually(self, holds: Callable[[], bool]) -> None:
        """Wait until ``holds``; fail after 30 s."""
        end = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < end, "the server has not done in 30 s what the test waits for"
            time.sleep(0.01)


@contextmanager
def stub_server(config: ServeConfig, **uvicorns: Any) -> Iterator[Stub]:
    """Serve the routes in a thread. ``uvicorns``: settings of uvicorn that differ."""
    service, seen = stub_service(config), Seen()
    app = guard(stub_app(service, seen), service)
    listener = bound_socket("127.0.0.1", 0)
    tls = uvicorns.pop("tls", None)
    settings = uvicorn_config(app, config, tls)
    for name, value in uvicorns.items():
        setattr(settings, name, value)
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.002)
        yield Stub(url_of(listener, tls is not None), listener.getsockname(), service, seen)
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


def call(app: ASGIApp, method: str, path: str, **request: Any) -> httpx.Response:
    """One request to ``app`` without a network."""

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://stub") as client:
            return await client.request(method, path, **request)

    return asyncio.run(send())
