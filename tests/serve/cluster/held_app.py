"""An application for the cluster whose replicas have routes that tests can hold at a point."""

# No `from __future__ import annotations`: Ray needs the builder's annotation as a class.

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from ray.serve import Application
from tide_runtime import Engine
from tide_serve.cluster.replica import load_app
from tide_serve.config import ServeConfig
from tide_serve.ray import ServingArgs, application

FOLDER = "TIDE_TEST_FOLDER"  # environment variable: where replicas and tests tell each other things by files
_POLL_S = 0.01


def app(args: ServingArgs) -> Application:
    return application(args, load_held)


def load_held(user_config: Mapping[str, Any]) -> tuple[Engine, FastAPI]:
    engine, app = load_app(ServeConfig(), False, user_config)

    @app.post("/test/replica")
    async def replica() -> dict[str, Any]:
        return {"pid": os.getpid(), "engine": user_config["engine"]}

    @app.post("/test/held/{name}")
    async def held(name: str) -> dict[str, int]:
        await _hold(name)
        return {"pid": os.getpid()}

    @app.post("/test/stream/{name}")
    async def stream(name: str) -> StreamingResponse:
        return StreamingResponse(_events(name), media_type="text/event-stream")

    return engine, app


async def _events(name: str) -> AsyncIterator[str]:
    yield f"data: {os.getpid()}\n\n"
    await _hold(name)
    yield "data: end\n\n"


async def _hold(name: str) -> None:
    """Show that replica PID is at this point, in the file NAME.at.PID, and wait there for the file NAME.go."""
    folder = Path(os.environ[FOLDER])
    (folder / f"{name}.at.{os.getpid()}").touch()
    try:
        while not (folder / f"{name}.go").exists():
            await asyncio.sleep(_POLL_S)
    except asyncio.CancelledError:
        (folder / f"{name}.cancelled").touch()
        raise
