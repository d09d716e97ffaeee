"""Refusing a request before it reaches a route."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from tide_serve.errors import ApiError
from tide_serve.observer import current_record


async def refuse(error: ApiError, reason: str, scope: Scope, receive: Receive, send: Send, close: bool = False) -> None:
    """Answer with ``error``.

    Args:
        reason: one word for the metrics.
        close: end the connection, for example so that the client's next one goes to another server.
    """
    record = current_record.get()
    if record is not None:
        record.refused = reason
    answer = error.response()
    if close:
        answer.headers["Connection"] = "close"
    await answer(scope, receive, send)
