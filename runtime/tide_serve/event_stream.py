"""Server-sent events: one JSON document per event, as OpenAI's API streams them."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send
from tide_runtime import TideError

from tide_serve.errors import ApiError, api_error

DONE = "data: [DONE]\n\n"
_log = logging.getLogger("tide_serve")

quoted = json.JSONEncoder(ensure_ascii=False).encode  # of a JSON value


def event(document: Mapping[str, Any]) -> str:
    """``document`` as one event."""
    return f"data: {quoted(document)}\n\n"


class EventStream(Response):
    """An answer of events.

    Args:
        first: the first events: a request that fails before them is answered with its status (see `begun`).
        rest: closed when the answer has ended, for whatever reason. Its error becomes a last event.
    """

    media_type = "text/event-stream"

    def __init__(self, first: str, rest: AsyncGenerator[str]) -> None:
        # Proxies such as nginx would otherwise collect events before they pass them on.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": self._first.encode(), "more_body": True})
            while (events := await self._next()) is not None:
                await send({"type": "http.response.body", "body": events.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> str | None:
        """The next events; None behind the last. An error is one event, and the last."""
        try:
            return await anext(self._rest, None)
        except (TideError, ApiError) as error:
            return event(api_error(error).body())
        except Exception as error:
            _log.exception("a stream failed")
            return event(api_error(error).body())


async def begun(events: AsyncGenerator[str]) -> EventStream:
    """The answer with ``events``, once the first of them are there. Raises what generating these raises."""
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, events)
