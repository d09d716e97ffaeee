"""Replicas whose answers are scripts, for tests of the ingress without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tide_serve.cluster.forwarded import ForwardedRequest

FOREVER = 3600.0


def start(kind: str, status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode())]}


def part(body: bytes, more_body: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more_body}


JSON, EVENTS = start("application/json"), start("text/event-stream; charset=utf-8")


class Answer:
    """One replica's answer: messages, seconds to wait, and exceptions to raise."""

    def __init__(self, script: list[Any]) -> None:
        self.cancelled = False
        self._steps = self._play(script)

    async def _play(self, script: list[Any]) -> AsyncIterator[dict[str, Any]]:
        for step in script:
            if isinstance(step, BaseException):
                raise step
            if isinstance(step, float):
                await asyncio.sleep(step)
            else:
                yield step

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self._steps

    def cancel(self) -> None:
        self.cancelled = True


class Replicas:
    """In place of a deployment's handle: the n-th request is answered by the n-th script."""

    def __init__(self, *scripts: list[Any]) -> None:
        self._scripts = list(scripts)
        self.answers: list[Answer] = []
        self.requests: list[ForwardedRequest] = []

    def options(self, stream: bool) -> Replicas:
        return self

    @property
    def answer(self) -> Replicas:
        return self

    def remote(self, request: ForwardedRequest) -> Answer:
        self.requests.append(request)
        self.answers.append(Answer(self._scripts.pop(0)))
        return self.answers[-1]
