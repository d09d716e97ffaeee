"""The chat page with an API behind it whose answers a test sets."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from tide_serve.api.app import page_routes

LAYERS = 30


class StubChat:
    """``app`` answers every chat with `pieces` until a test changes them.

    Args:
        pieces: text and depth of each token.
        thoughts: token of the model's thoughts, before the pieces; empty: it does not think.
        exits, names: of the models.
        key: that requests must carry; None: none.
        error: message of the error object that ends the stream after the pieces; None: it ends well.
        hangs: the stream stays open behind the pieces.
        requests: bodies of the chats so far.
        left: clients that closed a stream that hung.
    """

    def __init__(self) -> None:
        self.pieces: list[tuple[str, int]] = [("Hello", LAYERS), (" there", 0), (".", 12)]
        self.thoughts = ""
        self.exits = True
        self.names = ["stub-model"]
        self.key: str | None = None
        self.error: str | None = None
        self.hangs = False
        self.requests: list[dict[str, Any]] = []
        self.left = 0
        self.app = FastAPI()
        self.app.include_router(page_routes())
        self.app.add_api_route("/v1/models", self._models)
        self.app.add_api_route("/v1/chat/completions", self._chat, methods=["POST"], response_model=None)

    async def _models(self, request: Request) -> Response:
        data = [{"id": name, "object": "model", "exits": self.exits} for name in self.names]
        return self._refused(request) or JSONResponse({"object": "list", "data": data})

    async def _chat(self, request: Request) -> Response:
        self.requests.append(await request.json())
        return self._refused(request) or StreamingResponse(self._events(), media_type="text/event-stream")

    def _refused(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("Authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "the API key is wrong", "type": "authentication_error"}}, 401)

    async def _events(self) -> AsyncIterator[str]:
        if self.thoughts:
            yield _event(
                choices=[{"index": 0, "delta": {"reasoning_content": self.thoughts}, "depths": [9], "finish_reason": None}]
            )
        for text, depth in self.pieces:
            yield _event(choices=[{"index": 0, "delta": {"content": text}, "depths": [depth], "finish_reason": None}])
            await asyncio.sleep(0.002)
        try:
            while self.hangs:
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.left += 1
            raise
        if self.error is not None:
            yield _event(error={"message": self.error})
            return
        yield _event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        depth = {"layers_per_token": 14.2, "drafted": {"ngram": 3}, "accepted": {"ngram": 2}}
        yield _event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": len(self.pieces), "depth": depth})
        yield "data: [DONE]\n\n"


def _event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"
