"""What a client gets while replicas answer, fail and are lost; the replicas are scripts here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from tide_serve.cluster.relay import Relay

LOST = ActorDiedError()
FOREVER = 3600.0


def _start(kind: str, status: int = 200) -> dict[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode())]}


def _part(body: bytes, more_body: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more_body}


JSON, EVENTS = _start("application/json"), _start("text/event-stream; charset=utf-8")


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
        self.bodies: list[bytes] = []

    def options(self, stream: bool) -> Replicas:
        return self

    @property
    def answer(self) -> Replicas:
        return self

    def remote(self, request: Any) -> Answer:
        self.bodies.append(request.body)
        self.answers.append(Answer(self._scripts.pop(0)))
        return self.answers[-1]


def _post(replicas: Replicas, **options: Any) -> httpx.Response:
    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(Relay(replicas, **options), raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as client:
            return await client.post("/v1/completions", content=b'{"prompt": "x"}')

    return asyncio.run(post())


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tide_serve.cluster.relay._PAUSE_S", 0)


@pytest.mark.parametrize(
    "lost",
    [[LOST], [ActorUnavailableError("away", None)], [EVENTS, LOST], [JSON, LOST], [JSON, _part(b'{"half'), LOST]],
    ids=["at once", "unavailable", "before the first event", "before the body", "in the middle of a body"],
)
def test_lost_before_the_client_got_anything(lost):
    """Breaks: a machine that fails costs requests which another one could have answered; or parts of two answers are mixed."""
    replicas = Replicas(lost, [JSON, _part(b'{"a":'), _part(b" 1}", more_body=False)])
    answer = _post(replicas)
    assert (answer.status_code, answer.text) == (200, '{"a": 1}')
    assert replicas.bodies == [b'{"prompt": "x"}'] * 2


def test_lost_in_the_middle_of_a_stream():
    """Breaks: a client takes a cut text for a whole one, or gets the beginning of another replica's text behind it."""
    replicas = Replicas([EVENTS, _part(b"data: 1\n\n"), _part(b"data: 2\n\n"), LOST])
    *events, last, end = _post(replicas).text.split("\n\n")
    assert events == ["data: 1", "data: 2"] and end == ""
    assert "send the request again" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert len(replicas.answers) == 1


def test_all_replicas_lost():
    """Breaks: a request that makes every replica fail brings down the whole cluster, one replica after the other."""
    answer = _post(Replicas([LOST], [LOST]), attempts=2)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
    assert answer.json()["error"]["type"] == "service_unavailable_error"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BackPressureError(1, 1), 429, "queue_full"),
        (DeploymentUnavailableError("Model"), 503, "no_replica"),
        (RayTaskError("answer", "traceback", KeyError("inside")), 500, "internal_error"),
    ],
)
def test_failures_that_another_replica_cannot_mend(error, status, code):
    """Breaks: clients see status 500 for a busy cluster, or a failure is repeated on every replica."""
    replicas = Replicas([error])
    answer = _post(replicas)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert "inside" not in answer.text and len(replicas.answers) == 1


@pytest.mark.parametrize("failure", [LOST, RayTaskError("answer", "traceback", KeyError("inside"))])
def test_failure_behind_a_complete_answer(failure):
    """Breaks: an application that fails after it has answered, as Starlette's does after each status 500, ends the connection."""
    replicas = Replicas([JSON, _part(b"{}", more_body=False), failure])
    assert _post(replicas).text == "{}" and len(replicas.answers) == 1


def test_no_replica_in_time():
    """Breaks: clients wait for ever while no replica can be started."""
    replicas = Replicas([FOREVER])
    answer = _post(replicas, timeout=0.05)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
    assert replicas.answers[0].cancelled


def test_timeout_ends_with_the_beginning():
    """Breaks: a long stream is cut off when the time to begin it is over."""
    replicas = Replicas([EVENTS, _part(b"data: 1\n\n"), 0.2, _part(b"data: 2\n\n", more_body=False)])
    assert _post(replicas, timeout=0.1).text == "data: 1\n\ndata: 2\n\n"


def test_client_that_leaves_cancels_the_replica():
    """Breaks: the engine goes on for clients that are gone."""
    replicas = Replicas([EVENTS, _part(b"data: 1\n\n"), FOREVER])

    async def leave() -> None:
        got = asyncio.Event()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                got.set()

        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        task = asyncio.create_task(Relay(replicas)(scope, _no_body, send))
        await asyncio.wait_for(got.wait(), 5)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(leave())
    assert replicas.answers[0].cancelled


async def _no_body() -> dict[str, Any]:
    return {"type": "http.request", "body": b"", "more_body": False}
