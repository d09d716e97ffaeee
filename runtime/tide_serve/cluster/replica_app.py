"""What a deployment's options mean: the engine, the application around it, and the server's options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from fastapi import FastAPI
from tide_runtime import DepthOptions, Engine, EngineOptions, ThreadOptions
from tide_runtime.errors import ParamsError

from tide_serve.api.app import make_app
from tide_serve.config import ServeConfig
from tide_serve.http.recorder import RequestRecorder
from tide_serve.observe.logs import log_to_stderr

T = TypeVar("T")
# Options of `tide-serve` that are not the application's on a cluster, and what is in their place.
_ELSEWHERE = {
    "api_keys": "Ray shows arguments to whoever sees its dashboard; use api_key_file or the variable TIDE_API_KEYS",
    "tls_certificate": "Ray's proxies end TLS; use http_options.ssl_certfile of its configuration file",
    "tls_key": "Ray's proxies end TLS; use http_options.ssl_keyfile of its configuration file",
    "write_timeout": "Ray's proxies write to the clients; leave it out",
}


@dataclass(frozen=True)
class ReplicaConfig:
    """The deployment's ``user_config``.

    Args:
        bundle: a directory on the replica's machine.
        engine: fields of `EngineOptions`.
        threads: of ONNX Runtime; 0: one per core.
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
        return _checked(EngineOptions, "engine", {**values, "depth": depth, "threads": threads})


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
