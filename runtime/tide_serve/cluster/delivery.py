"""What a client has got of an answer, which decides whether another replica may give it."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import Message, Send

from tide_serve.errors import ApiError
from tide_serve.event_stream import event


class Delivery:
    """Passes one answer on to the client.

    A stream of events is passed on from its first part. Any other answer is kept until it is whole, so that the client gets
    it from one replica or not at all.

    Attributes:
        begun: the client has a part of the answer, so no other replica may answer.
        complete: the client has all of it.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._kept: list[Message] = []
        self._is_stream = False
        self.begun = self.complete = False

    async def take(self, message: Message) -> None:
        """The replica's next message."""
        self._kept.append(message)
        if message["type"] == "http.response.start":
            self._is_stream = Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
            return
        self.complete = not message.get("more_body", False)
        if self._is_stream or self.complete:
            kept, self._kept = self._kept, []
            self.begun = True
            for each in kept:
                await self._send(each)

    def forget(self) -> None:
        """The replica is lost: drop what the client has not got."""
        self._kept.clear()

    async def break_off(self, error: ApiError) -> None:
        """End a stream of which the client has a part with ``error`` as its last event."""
        last = {"type": "http.response.body", "body": event(error.body()).encode(), "more_body": False}
        await self._send(last)
