"""One HTTP connection of the server, guarded against clients that send too slowly, too much, or do not read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tide_serve.config import ServeConfig
from tide_serve.errors import ApiError

MAX_HEADER_BYTES = 32 * 2**10
_MAX_DISCARDED_BYTES = 16 * 2**20


class GuardedConnection(HttpToolsProtocol):
    """uvicorn's connection with limits that it does not have.

    - Headers arrive within ``body_timeout`` of the connection or of the request's first byte, or the connection is closed.
      Nothing counts while the server itself has stopped reading. Bodies are timed by `ReadBody`, which answers slow ones.
    - URL and headers have at most `MAX_HEADER_BYTES`, or the answer is 431.
    - While a client reads none of what waits for it during ``write_timeout``, the connection is aborted, which ends its request.
    - The rest of a refused body is discarded, so that the client reads why; after ``body_timeout`` the connection is closed,
      after 16 MiB it is aborted.
    """

    def __init__(self, limits: ServeConfig, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._limits = limits
        self._arrival: asyncio.TimerHandle | None = None  # runs while headers, or the rest of a refused body, are expected
        self._reading: asyncio.TimerHandle | None = None  # runs while the client does not read
        self._in_headers = True
        self._header_bytes = 0
        self._discarded = 0
        self._headers_too_large = False

    # --- connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # By default up to 64 KiB wait for a client before `pause_writing` tells of it. TLS transports pause for ever with high=0.
        transport.set_write_buffer_limits(high=1, low=0)
        self._expect(self._limits.body_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._arrival, self._reading):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    # --- what arrives

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._header_bytes += len(data)
            if self._arrival is None:
                self._expect(self._limits.body_timeout)
        super().data_received(data)
        if self._in_headers and self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self._headers_too_large = True
            self._refuse()

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEADER_BYTES:
            self._headers_too_large = True
            raise ValueError  # the parser hands it to uvicorn, which calls `send_400_response`
        super().on_headers_complete()
        self._in_headers = False
        self._header_bytes = 0
        self._discarded = 0
        self._stop_expecting()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > _MAX_DISCARDED_BYTES:
                self.transport.abort()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_headers = True
        if self.cycle.response_complete:  # the body was refused; uvicorn's keep-alive timer ended when its first bytes came
            self._expect(self.timeout_keep_alive)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_headers and self.cycle.response_complete:  # the rest of a refused body is still to come
            self._expect(self._limits.body_timeout)

    def _expect(self, seconds: float) -> None:
        """Close the connection unless what is expected arrives within ``seconds``."""
        self._stop_expecting()
        self._arrival = self.loop.call_later(seconds, self._late)

    def _stop_expecting(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _late(self) -> None:
        self._arrival = None
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering or self.flow.read_paused:
            self._expect(self._limits.body_timeout)
        else:
            self.transport.close()

    # --- what is refused

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what is not HTTP."""
        self._refuse()

    def _refuse(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # the client would take these bytes for a part of the answer in progress
            return
        if self._headers_too_large:
            message = f"the URL and headers have more than {MAX_HEADER_BYTES} bytes; send less"
            error = ApiError(431, message, code="headers_too_large")
        else:
            error = ApiError(400, "the request is not valid HTTP/1.1; use an HTTP client", code="invalid_http")
        body = json.dumps(error.body({"path": "", "headers": []})).encode()  # of no route: it has not been read
        headers = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + headers + body)
        self.transport.close()

    # --- what is sent

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _watch_reader(self, unread: int) -> None:
        self._reading = self.loop.call_later(self._limits.write_timeout, self._check_reader, unread)

    def _check_reader(self, unread: int) -> None:
        """Abort the connection if nothing of the ``unread`` bytes has left since they were counted."""
        still_unread = self.transport.get_write_buffer_size()
        if still_unread < unread:
            self._watch_reader(still_unread)
        else:
            self.transport.abort()
