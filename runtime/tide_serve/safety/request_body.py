"""Bodies of requests: they are not too large, and arrive in time."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tide_serve.errors import ApiError
from tide_serve.observer import current_record
from tide_serve.safety.refusal import refuse


class ReadBody:
    """Reads a request's body whole and passes it on in one piece, or refuses it.

    Args:
        max_bytes: larger ones are refused with 413, before they are read where the headers tell the size.
        timeout: seconds; slower ones are refused with 408.
        log_text: keep the body for the log.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout: float, log_text: bool = False) -> None:
        self._app, self._max_bytes, self._timeout, self._log_text = app, max_bytes, timeout, log_text

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(headers := Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        try:
            length = headers.get("content-length", "0")
            if not length.isdecimal() or int(length) > self._max_bytes:
                raise self._too_large()
            body = await self._read(receive)
        except ApiError as error:
            # A slow client may go on sending for as long as it likes, the rest of a large body is discarded.
            await refuse(error, error.code or "body", scope, receive, send, close=error.status == 408)
            return
        if body is None:  # the client has left
            return
        record = current_record.get()
        if self._log_text and record is not None:
            record.request_text = body.decode(errors="replace")
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        del body  # the route's copy is the only one while it generates

        async def receive_whole() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, receive_whole, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """The body; None where the client left first. Raises ApiError."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self._max_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError as error:
            about = f"the body did not arrive within {self._timeout:g} s; send it without pauses"
            raise ApiError(408, about, code="body_timeout") from error

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._max_bytes} bytes; send less", code="body_too_large")


def _has_body(headers: Headers) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
