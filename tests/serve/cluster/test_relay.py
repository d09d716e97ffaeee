"""What a client gets while replicas answer, fail and are lost."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from serve.cluster.scripted_replicas import EVENTS, FOREVER, JSON, Replicas, part
from tide_serve.cluster.ingress import Relay

LOST = ActorDiedError()


def _post(replicas: Replicas, path: str = "/v1/completions", **options: Any) -> httpx.Response:
    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(Relay(replicas, **options), raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as client:
            return await client.post(path, content=b'{"prompt": "x"}')

    return asyncio.run(post())


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tide_serve.cluster.ingress._PAUSE_S", 0)


@pytest.mark.parametrize(
    "lost",
    [[LOST], [ActorUnavailableError("away", None)], [EVENTS, LOST], [JSON, LOST], [JSON, part(b'{"half'), LOST]],
    ids=["at once", "unavailable", "before the first event", "before the body", "in the middle of a body"],
)
def test_lost_before_the_client_got_anything(lost):
    """Breaks: a machine that fails costs requests which another one could have answered; or parts of two answers are mixed."""
    replicas = Replicas(lost, [JSON, part(b'{"a":'), part(b" 1}", more_body=False)])
    answer = _post(replicas)
    assert (answer.status_code, answer.text) == (200, '{"a": 1}')
    assert [request.body for request in replicas.requests] == [b'{"prompt": "x"}'] * 2


def test_lost_in_the_middle_of_a_stream():
    """Breaks: a client takes a cut text for a whole one, or gets the beginning of another replica's text behind it."""
    replicas = Replicas([EVENTS, part(b"data: 1\n\n"), part(b"data: 2\n\n"), LOST])
    *events, last, end = _post(replicas).text.split("\n\n")
    assert events == ["data: 1", "data: 2"] and end == ""
    assert "send the request again" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert len(replicas.answers) == 1


def test_anthropics_clients_read_what_went_wrong():
    """Breaks: Anthropic's client takes a cut text for a whole one, as it skips events without a name."""
    answer = _post(Replicas([EVENTS, part(b"event: a\ndata: 1\n\n"), LOST]), "/v1/messages")
    name, data = answer.text.split("\n\n")[1].split("\n")
    error = json.loads(data.removeprefix("data: "))
    assert (name, error["type"], error["error"]["type"]) == ("event: error", "error", "api_error")
    answer = _post(Replicas([LOST]), "/v1/messages/count_tokens", attempts=1)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")


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


def test_no_replica_in_time():
    """Breaks: clients wait for ever while no replica can be started."""
    replicas = Replicas([FOREVER])
    answer = _post(replicas, timeout=0.05)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
    assert replicas.answers[0].cancelled


def test_timeout_ends_with_the_beginning():
    """Breaks: a long stream is cut off when the time to begin it is over."""
    replicas = Replicas([EVENTS, part(b"data: 1\n\n"), 0.2, part(b"data: 2\n\n", more_body=False)])
    assert _post(replicas, timeout=0.1).text == "data: 1\n\ndata: 2\n\n"


def test_client_that_leaves_cancels_the_replica():
    """Breaks: the engine goes on for clients that are gone."""
    replicas = Replicas([EVENTS, part(b"data: 1\n\n"), FOREVER])

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
