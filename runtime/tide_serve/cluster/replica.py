"""A replica: an engine and its application, which answers requests that the ingress forwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from fastapi import FastAPI
from ray import serve
from starlette.types import ASGIApp, Message, Scope
from tide_runtime import DepthOptions, Engine, EngineOptions, ThreadOptions
from tide_runtime.errors import ParamsError

from tide_serve.api.app import make_app
from tide_serve.cluster.forwarded import ForwardedRequest
from tide_serve.config import ServeConfig
from tide_serve.http.recorder import RequestRecorder
from tide_serve.observe.logs import log_to_stderr

UserConfig = Mapping[str, Any]
LoadApp = Callable[[UserConfig], tuple[Engine, FastAPI]]
T = TypeVar("T")
# Options of `tide-serve` that a cluster has elsewhere, and where.
_ELSEWHERE = {
    "api_keys": "Ray shows arguments on its dashboard; use api_key_file or the variable TIDE_API_KEYS",
    "tls_certificate": "Ray's proxies end TLS; use http_options.ssl_certfile of its configuration file",
    "tls_key": "Ray's proxies end TLS; use http_options.ssl_keyfile of its configuration file",
    "write_timeout": "Ray's proxies write to the clients; leave it out",
}


class Model:
    """The class of the Ray deployment.

    Ray calls `reconfigure` before the first request and whenever ``user_config`` changes; the replica gets no new requests
    meanwhile, and finishes those in progress on the engine that they began on.

    Args:
        load: makes the engine, and the application that serves it, from the deployment's ``user_config``.
    """

    def __init__(self, load: LoadApp) -> None:
        self._load = load
        self._config: UserConfig | None = None
        self._serving: _Serving | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def reconfigure(self, user_config: UserConfig) -> None:
        """Serve what ``user_config`` names. Raises TideError when it cannot be loaded; Ray then replaces this replica."""
        if user_config == self._config:  # Ray also calls when the replica's rank changes
            return
        serving = _Serving(*await asyncio.to_thread(self._load, user_config))
        await serving.start()
        replaced = self._serving
        self._serving = serving
        self._config = user_config
        if replaced is not None:
            closing = asyncio.create_task(replaced.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def answer(self, request: ForwardedRequest) -> AsyncIterator[Message]:
        """The ASGI messages of the answer."""
        serving = self._ready()
        with serving.request():
            async with aclosing(answer_messages(serving.app, request.scope, request.body)) as messages:
                async for message in messages:
                    yield message

    async def check_health(self) -> None:
        """Raises RuntimeError when the replica has to be replaced."""
        if not self._ready().engine.healthy:
            raise RuntimeError("the engine takes no requests; the replica's log tells the reason")

    async def metrics(self) -> tuple[str, str]:
        """The replica's name, and its engine's metrics in the Prometheus text format."""
        return serve.get_replica_context().replica_id.unique_id, self._ready().engine.metrics()

    async def __del__(self) -> None:
        """Ray calls and awaits this when the replica's requests have ended, or the time for that is over."""
        if self._serving is not None:
            await self._serving.close()

    def _ready(self) -> _Serving:
        if self._serving is None:
            raise RuntimeError("the deployment has no user_config; give it {'bundle': PATH}")
        return self._serving


class _Serving:
    """An engine, its application, and how many requests it has in progress."""

    def __init__(self, engine: Engine, app: FastAPI) -> None:
        self.engine, self.app = engine, app
        self._lifespan = app.router.lifespan_context(app)
        self._in_progress = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        await self._lifespan.__aenter__()

    @contextmanager
    def request(self) -> Iterator[None]:
        self._in_progress += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_progress -= 1
            if not self._in_progress:
                self._idle.set()

    async def close(self) -> None:
        """Wait for the last request, then end the application, which closes the engine."""
        await self._idle.wait()
        await self._lifespan.__aexit__(None, None, None)
        self.app.state.service.observer.close()


async def answer_messages(app: ASGIApp, scope: Scope, body: bytes) -> AsyncGenerator[Message]:
    """The messages with which ``app`` answers; body parts that are ready at the same time are joined.

    Closing the iterator early, or cancelling its consumer, disconnects the application and cancels its task. Raises what the
    application raises.
    """
    sent: list[Message] = []
    news = asyncio.Event()
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    left = asyncio.Event()

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        news.set()

    task = asyncio.ensure_future(app(scope, receive, send))
    task.add_done_callback(lambda _: news.set())
    try:
        while not task.done() or sent:
            await news.wait()
            news.clear()
            messages, sent[:] = _joined(sent), []
            for message in messages:
                yield message
        await task
    finally:
        left.set()
        task.cancel()
        await asyncio.wait([task])


def _joined(messages: list[Message]) -> list[Message]:
    """Consecutive body parts as one: each message that crosses processes costs about a millisecond."""
    joined: list[Message] = []
    for message in messages:
        if joined and joined[-1]["type"] == message["type"] == "http.response.body":
            body = joined[-1].get("body", b"") + message.get("body", b"")
            joined[-1] = {**message, "body": body}
        else:
            joined.append(message)
    return joined


# --- options, engine and application


@dataclass(frozen=True)
class ReplicaConfig:
    """The deployment's ``user_config``.

    Args:
        bundle: a directory on the replica's machine.
        engine: fields of `EngineOptions`.
        threads: ONNX Runtime's threads; 0: one per core.
    """

    bundle: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 0

    @classmethod
    def of(cls, user_config: Mapping[str, Any]) -> ReplicaConfig:
        """Raises ParamsError for other names, and without a bundle."""
        if not user_config.get("bundle"):
            raise ParamsError("user_config has no bundle; add the bundle's directory")
        return _checked(cls, "user_config", user_config)

    def options(self) -> EngineOptions:
        """Raises ParamsError for names that `EngineOptions` and `DepthOptions` do not have, and values that they refuse."""
        values = dict(self.engine)
        depth = _checked(DepthOptions, "engine.depth", values.pop("depth", {}))
        # One thread pool for the engine's graphs, as a replica's process runs no other sessions.
        threads = ThreadOptions(self.threads, shared=True)
        return _checked(EngineOptions, "engine", {"share_weights": True, **values, "depth": depth, "threads": threads})


def load_app(config: ServeConfig, otel: bool, user_config: Mapping[str, Any]) -> tuple[Engine, FastAPI]:
    """The engine and the application of a replica, in the replica's process.

    The application only records its requests: the ingress has checked what it gets.

    Args:
        otel: send traces, as ``tide-serve --otel`` does.
        user_config: see `ReplicaConfig`.

    Raises BundleError, TargetError, ParamsError.
    """
    log_to_stderr(config.log_text)
    replica = ReplicaConfig.of(user_config)
    engine = Engine.load(replica.bundle, replica.options())
    app = make_app(engine, config)
    app.add_middleware(RequestRecorder, state=app.state.service)
    if otel:
        from tide_serve.observe.telemetry import TracingObserver

        app.state.service.observer = TracingObserver.over_otlp()
    return engine, app


def server_config(values: Mapping[str, Any]) -> ServeConfig:
    """Raises ParamsError for names that `ServeConfig` does not have or a cluster does not use, and values that it refuses."""
    for name in values.keys() & _ELSEWHERE.keys():
        raise ParamsError(f"server.{name} cannot be set here: {_ELSEWHERE[name]}")
    return _checked(ServeConfig, "server", {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})


def _checked(kind: Callable[..., T], where: str, values: Mapping[str, Any]) -> T:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    if unknown:
        raise ParamsError(f"{where} has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    return kind(**values)
