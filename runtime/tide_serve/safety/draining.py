"""Requests that come while the server is ending."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from tide_serve.errors import ApiError
from tide_serve.safety.guarded import Guarded
from tide_serve.safety.paths import PROBES, path_of
from tide_serve.safety.refusal import refuse


class RefuseWhileDraining:
    """Answers new requests with 503 once ``service.draining`` is set; those in progress go on."""

    def __init__(self, app: ASGIApp, service: Guarded) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._service.draining and path_of(scope) not in PROBES:
            error = ApiError(503, "the server is ending; send the request again", code="draining", retry_after=1)
            await refuse(error, "draining", scope, receive, send, close=True)
        else:
            await self._app(scope, receive, send)
