"""A replica: one engine behind the application, which answers requests that the ingress forwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

from fastapi import FastAPI
from ray import serve
from starlette.types import ASGIApp, Message, Scope
from tide_runtime import Engine

from tide_serve.cluster.affinity import ForwardedRequest

UserConfig = Mapping[str, Any]
LoadApp = Callable[[UserConfig], tuple[Engine, FastAPI]]


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
        replaced, self._serving, self._config = self._serving, serving, user_config
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
        """When the last request has ended, end the application, which closes the engine."""
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
