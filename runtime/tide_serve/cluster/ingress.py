"""The ingress: the checks of a server on a network, probes, and a relay that sends each request to a replica.

When a replica is lost before the client has a part of the answer, the request goes to another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tide_serve.api.event_stream import error_event
from tide_serve.cluster.forwarded import ForwardedRequest
from tide_serve.config import ServeConfig, api_keys
from tide_serve.errors import ApiError
from tide_serve.http.middlewares import guard
from tide_serve.observe.logs import log_to_stderr
from tide_serve.observe.metric_pages import merged_pages
from tide_serve.observe.request_record import ServerState

_log = logging.getLogger("tide_serve")
_PROBE_S = 2.0
_GRACE_S = 10.0  # seconds beyond an answer's own time limit before the ingress ends it
_PAUSE_S = 0.1  # seconds before the second attempt, twice as many before the third: Ray is slow to notice a lost replica


def ingress_builder(deployment: str, config: ServeConfig, api_key_file: Path | None = None) -> Callable[[], ASGIApp]:
    """What makes the application in the ingress' process.

    Args:
        deployment: the name of the replicas' deployment in the same Ray application.
        api_key_file: on the ingress' machine. Keys are read there, so that they are in no configuration that Ray stores or shows.
    """

    def build() -> ASGIApp:  # a plain function, as Ray takes any other callable for the application itself
        log_to_stderr(config.log_text)
        keys = api_keys(api_key_file, config.api_keys)
        return ingress_app(serve.get_deployment_handle(deployment), replace(config, api_keys=keys))

    return build


def ingress_app(model: DeploymentHandle, config: ServeConfig) -> ASGIApp:
    """The application whose requests the replicas of ``model`` answer."""
    state = ServerState(config)  # never draining: Ray sends nothing to an ingress that it is about to end

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> PlainTextResponse:
        pages = await model.broadcast("metrics").results_async(timeout_s=_PROBE_S, return_exceptions=True)
        answered = [page for page in pages if not isinstance(page, BaseException)]
        replicas = merged_pages(({"replica": name}, page) for name, page in answered)
        return PlainTextResponse(replicas + state.metrics.text(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    routes = [
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/ready", Relay(model, attempts=1, timeout=_PROBE_S)),
        Mount("/", Relay(model, timeout=config.request_timeout + _GRACE_S)),
    ]
    return _without_request_id(guard(Starlette(routes=routes), state))


def _without_request_id(app: ASGIApp) -> ASGIApp:
    """Ray's proxy gives every request its id and adds this header to the answer; clients would read it twice."""

    async def without(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_rest(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name.lower() != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_rest)

    return without


class _Lost(Exception):
    """The replica is gone; another one may answer if the client has got nothing."""


@dataclass(frozen=True)
class Relay:
    """An ASGI application that answers HTTP requests through the replicas of ``model``.

    A client that disconnects cancels the replica's work. An answer is never given twice, nor put together from two replicas.

    Args:
        attempts: replicas that a request is sent to, one after the other, while the client has got nothing.
        timeout: seconds in which an answer has to begin, queueing and all attempts included.
    """

    model: DeploymentHandle
    attempts: int = 3
    timeout: float = 600.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        delivery = Delivery(scope, send)
        try:
            await self._deliver(ForwardedRequest.of(scope, body), delivery)
        except ApiError as error:
            if delivery.begun:
                await delivery.break_off(error)
            else:
                await error.response(scope)(scope, receive, send)

    async def _deliver(self, request: ForwardedRequest, delivery: Delivery) -> None:
        """Raises ApiError where the answer did not come to its end."""
        deadline = asyncio.get_running_loop().time() + self.timeout
        for attempt in range(self.attempts):
            await asyncio.sleep(_PAUSE_S * attempt)
            try:
                return await self._attempt(request, delivery, deadline)
            except _Lost as lost:
                _log.warning("attempt %d: a replica was lost (%s)", attempt + 1, type(lost.__cause__).__name__)
                if delivery.begun:
                    raise ApiError(502, "the replica was lost in the middle of its answer; send the request again") from lost
                delivery.forget()
        raise ApiError(503, f"{self.attempts} replicas were lost one after the other", code="replica_lost", retry_after=5)

    async def _attempt(self, request: ForwardedRequest, delivery: Delivery, deadline: float) -> None:
        """Raises _Lost, and ApiError for what another replica would not do better."""
        answer = cast(DeploymentResponseGenerator[Message], self.model.options(stream=True).answer.remote(request))
        ended = False
        try:
            async with asyncio.timeout_at(deadline) as patience:
                async for message in answer:
                    await delivery.pass_on(message)
                    if delivery.begun:
                        patience.reschedule(None)
            ended = True
        except TimeoutError as error:
            reason = f"no replica answered within {self.timeout:g} s"
            raise ApiError(503, reason, code="no_replica", retry_after=5) from error
        except BackPressureError as error:
            reason = "too many requests wait for a replica; send this one again later"
            raise ApiError(429, reason, code="queue_full", retry_after=1) from error
        except DeploymentUnavailableError as error:
            reason = "no replica can be started; the deployment's status in Ray tells the reason"
            raise ApiError(503, reason, code="no_replica", retry_after=30) from error
        except RayError as error:
            ended = True
            self._failed(error, delivery)
        finally:
            if not ended:
                answer.cancel()

    @staticmethod
    def _failed(error: RayError, delivery: Delivery) -> None:
        if delivery.complete:
            return  # a failure after the answer does not change it
        if not isinstance(error, RayTaskError):
            raise _Lost from error
        _log.error("a replica failed to answer; its log tells the reason")  # the error may quote the request
        raise ApiError(500, "the server failed; its log names the request id", code="internal_error") from error


class Delivery:
    """Passes one answer on to the client.

    A stream of events is passed on from its first part. Any other answer is kept until it is whole, so that the client gets
    it from one replica or not at all.

    Attributes:
        begun: the client has a part of the answer, so no other replica may answer.
        complete: the client has all of it.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._unsent: list[Message] = []
        self._is_stream = False
        self.begun = self.complete = False

    async def pass_on(self, message: Message) -> None:
        """The replica's next message."""
        self._unsent.append(message)
        if message["type"] == "http.response.start":
            self._is_stream = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
            return
        self.complete = not message.get("more_body", False)
        if self._is_stream or self.complete:
            messages = self._unsent
            self._unsent = []
            self.begun = True
            for each in messages:
                await self._send(each)

    def forget(self) -> None:
        """The replica is lost: drop what the client has not got."""
        self._unsent.clear()

    async def break_off(self, error: ApiError) -> None:
        """End a stream of which the client has a part with ``error`` as its last event."""
        last = {"type": "http.response.body", "body": error_event(error, self._scope).encode(), "more_body": False}
        await self._send(last)
