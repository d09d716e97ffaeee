"""One request through an ASGI application in the same process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.types import ASGIApp, Message, Scope


async def answer_messages(app: ASGIApp, scope: Scope, body: bytes) -> AsyncGenerator[Message]:
    """The messages with which ``app`` answers; body parts that are ready at the same time are joined.

    Closing the iterator early, or cancelling its consumer, disconnects the application and cancels its task. Raises what the
    application raises.
    """
    sent: list[Message] = []
    news = asyncio.Event()
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    left = asyncio.Event()

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        news.set()

    task = asyncio.ensure_future(app(scope, receive, send))
    task.add_done_callback(lambda _: news.set())
    try:
        while not task.done() or sent:
            await news.wait()
            news.clear()
            messages, sent[:] = _joined(sent), []
            for message in messages:
                yield message
        await task
    finally:
        left.set()
        task.cancel()
        await asyncio.wait([task])


def _joined(messages: list[Message]) -> list[Message]:
    """Consecutive body parts as one: each message that crosses processes costs about a millisecond."""
    joined: list[Message] = []
    for message in messages:
        if joined and joined[-1]["type"] == message["type"] == "http.response.body":
            body = joined[-1].get("body", b"") + message.get("body", b"")
            joined[-1] = {**message, "body": body}
        else:
            joined.append(message)
    return joined
