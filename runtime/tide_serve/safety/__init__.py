"""What stands between the network and the routes: pure ASGI middlewares that pass streamed chunks on at once."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp
from tide_runtime import Engine

from tide_serve.app import make_app
from tide_serve.config import ServeConfig
from tide_serve.safety.api_keys import RequireKey
from tide_serve.safety.client_limits import LimitClients
from tide_serve.safety.draining import RefuseWhileDraining
from tide_serve.safety.guarded import Guarded
from tide_serve.safety.host_names import CheckHost
from tide_serve.safety.recorder import RequestRecorder
from tide_serve.safety.request_body import ReadBody

_SHOWN_TO_SCRIPTS = ["X-Request-Id", "Retry-After"] + [f"x-ratelimit-{name}-requests" for name in ("limit", "remaining", "reset")]


def guard(app: ASGIApp, service: Guarded) -> ASGIApp:
    """``app`` behind all checks, which run in this order:

    1. `RequestRecorder`: request id, security headers, log line and metrics, for refused requests as well.
    2. `CheckHost`, only with ``allowed_hosts``: 421 for a request to another host.
    3. CORS, only with ``cors_origins``: a browser's preflight carries no key, and a refusal must be readable by its page.
    4. `RefuseWhileDraining`: 503 once the server is ending.
    5. `RequireKey`: 401. Nothing of a body is read before the key is known to be right.
    6. `LimitClients`: 429 for a client with too many requests.
    7. `ReadBody`: 413 or 408; the routes get the whole body at once, and check what is in it.
    """
    config = service.config
    app = ReadBody(app, config.max_body_bytes, config.body_timeout, config.log_text)
    app = LimitClients(app, config.requests_at_once_per_key, config.requests_per_minute_per_key)
    app = RequireKey(app, config.api_keys, open_page=config.page)
    app = RefuseWhileDraining(app, service)
    if config.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=_SHOWN_TO_SCRIPTS,
        )
    if config.allowed_hosts is not None:
        app = CheckHost(app, config.allowed_hosts)
    return RequestRecorder(app, service)


def guarded_app(engine: Engine, config: ServeConfig | None = None) -> ASGIApp:
    """The application of ``engine`` as it may stand on a network; see `make_app` and `guard`. Raises ParamsError."""
    app: FastAPI = make_app(engine, config)
    return guard(app, app.state.service)
