"""What is done for every request, refused or answered: its id, security headers, the log line, and the metrics."""

from __future__ import annotations

import asyncio
import logging
import re
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tide_serve.errors import api_error, is_anthropic, path_of, stopping
from tide_serve.observe.request_record import RequestRecord, ServerState, current_record

PROBES = frozenset({"/health", "/ready", "/metrics"})  # answered while draining, not limited, not logged when all is well
_log = logging.getLogger("tide_serve.error")
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_CLIENT_LEFT = 499  # nginx's status for it
_TRACE_HEADERS = ("traceparent", "tracestate")
_SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),  # the chat page has its own
)


class RequestRecorder:
    """The outermost middleware. The application's errors end here: as a 500 where its answer has not begun."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:  # the checks are written for HTTP, and there are no websocket routes
            await send({"type": "websocket.close", "code": 1003})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        exchange = _Exchange(_record(scope), receive, send)
        record = exchange.record
        counted = path_of(scope) not in PROBES
        token = current_record.set(record)
        state.metrics.in_progress += counted
        if counted:
            state.observer.began(record)
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            if not state.draining:
                raise
            if not record.status:  # a second signal ends the server
                await stopping().response(scope)(scope, receive, exchange.send)
        except Exception as error:
            _log.error("the application failed", exc_info=error)
            if not record.status:
                await api_error(error).response(scope)(scope, receive, exchange.send)
        finally:
            record.aborted |= not exchange.complete
            record.status = record.status or _CLIENT_LEFT
            state.metrics.in_progress -= counted
            record.route = getattr(scope.get("route"), "path", record.route)
            state.metrics.count(record)
            if counted:
                state.observer.ended(record)
            record.log(logging.INFO if counted or record.status >= 400 else logging.DEBUG)
            current_record.reset(token)


class _Exchange:
    """One request and its answer, as the application sends it."""

    def __init__(self, record: RequestRecord, receive: Receive, send: Send) -> None:
        self.record = record
        self.complete = False
        self._receive, self._send = receive, send

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect" and not self.complete:
            self.record.aborted = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.record.status = message["status"]
            message = {**message, "headers": self._headers(list(message.get("headers", ())))}
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True
        await self._send(message)

    def _headers(self, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The answer's ``headers`` and those of every answer; a route's own come first."""
        present = {name.lower() for name, _ in headers}
        added = ((b"x-request-id", self.record.id.encode()), *_SECURITY_HEADERS, *self.record.headers)
        return headers + [(name, value) for name, value in added if name not in present]


def _record(scope: Scope) -> RequestRecord:
    headers = Headers(scope=scope)
    given = headers.get("x-request-id", "")
    request_id = given if _SANE_ID.fullmatch(given) else uuid4().hex
    return RequestRecord(
        id=request_id,
        method=scope["method"],
        path=path_of(scope),
        trace_headers={name: headers[name] for name in _TRACE_HEADERS if name in headers},
        headers=[(b"request-id", request_id.encode())] if is_anthropic(scope) else [],  # where Anthropic's clients look for it
    )
