"""The application on a free loopback port, in a uvicorn server in a thread of the test process."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from tide_runtime import Engine, EngineOptions, ThreadOptions
from tide_serve import ServeConfig, make_app


@dataclass(frozen=True)
class Served:
    """A running server.

    Args:
        url: such as ``http://127.0.0.1:40123``, without ``/v1``.
    """

    url: str
    engine: Engine
    app: FastAPI

    def wait_idle(self, seconds: float = 10) -> None:
        """Wait until no request runs or waits in the engine. Raises AssertionError where one still does."""
        deadline = time.monotonic() + seconds
        while (stats := self.engine.stats()).running or stats.waiting:
            assert time.monotonic() < deadline, f"{stats.running} requests still run and {stats.waiting} wait"
            time.sleep(0.005)


@contextmanager
def serving(bundle: Path, config: ServeConfig | None = None, **options: Any) -> Iterator[Served]:
    """Serve ``bundle`` while the context is open; ``options`` are those of `EngineOptions` (max_batch 4, one thread)."""
    engine = Engine.load(bundle, EngineOptions(**{"max_batch": 4, "threads": ThreadOptions(1), **options}))
    app = make_app(engine, config or ServeConfig())
    try:
        with listening(app) as url:
            yield Served(url, engine, app)
    finally:
        engine.close(abort=True)


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """The address of ``app`` while the context is open."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            _wait_started(server, thread)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)


def _wait_started(server: uvicorn.Server, thread: threading.Thread) -> None:
    deadline = time.monotonic() + 30
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the server did not start; see its log above"
        time.sleep(0.002)
