"""What a deployment's options mean: the engine, the application around it, and the server's options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from fastapi import FastAPI
from tide_runtime import DepthOptions, Engine, EngineOptions, ThreadOptions
from tide_runtime.errors import ParamsError

from tide_serve.app import make_app
from tide_serve.config import ServeConfig
from tide_serve.logs import log_to_stderr
from tide_serve.safety.recorder import RequestRecorder

T = TypeVar("T")


def load_app(config: ServeConfig, otel: bool, user_config: Mapping[str, Any]) -> tuple[Engine, FastAPI]:
    """The engine and the application of a replica, in the replica's process.

    The application only records its requests: the ingress has checked what it gets.

    Args:
        otel: send traces, as ``tide-serve --otel`` does.
        user_config: of the deployment: ``bundle``, a directory; ``engine``, fields of `EngineOptions`; ``threads``.

    Raises BundleError, TargetError, ParamsError.
    """
    log_to_stderr(config.log_text)
    engine = Engine.load(user_config["bundle"], engine_options(user_config))
    app = make_app(engine, config)
    app.add_middleware(RequestRecorder, service=app.state.service)
    if otel:
        from tide_serve.telemetry import TracingObserver

        app.state.service.observer = TracingObserver.over_otlp()
    return engine, app


def engine_options(user_config: Mapping[str, Any]) -> EngineOptions:
    """Raises ParamsError for names that `EngineOptions` and `DepthOptions` do not have, and values that they refuse."""
    values = dict(user_config.get("engine", {}))
    depth = _checked(DepthOptions, "engine.depth", values.pop("depth", {}))
    # One thread pool for the engine's graphs, as a replica's process runs no other sessions.
    threads = ThreadOptions(user_config.get("threads", 0), shared=True)
    return _checked(EngineOptions, "engine", {**values, "depth": depth, "threads": threads})


def server_config(values: Mapping[str, Any]) -> ServeConfig:
    """Raises ParamsError for names that `ServeConfig` does not have, and values that it refuses."""
    return _checked(ServeConfig, "server", {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()})


def _checked(kind: Callable[..., T], where: str, values: Mapping[str, Any]) -> T:
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(values) - known)
    if unknown:
        raise ParamsError(f"{where} has no option {', '.join(unknown)}; set some of {', '.join(sorted(known))}")
    return kind(**values)
