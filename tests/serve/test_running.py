"""What becomes of a request whose client leaves, whose time is over, or whose server stops."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.types.shared import ErrorResponse
from openai.types.responses import ResponseFailedEvent
from serve.live import Served, serving
from tide_runtime import GenerationParams
from tide_serve import ServeConfig

Serve = Callable[..., AbstractContextManager[Served]]
LONG: dict[str, Any] = {"prompt": "def", "max_tokens": 500, "ignore_eos": True}
RESPONSE: dict[str, Any] = {"input": "def", "max_output_tokens": 500, "ignore_eos": True}
MESSAGE: dict[str, Any] = {"messages": [{"role": "user", "content": "def"}], "max_tokens": 500, "ignore_eos": True}


@pytest.fixture(scope="module")
def serve_app(bundle: Path) -> Serve:
    """Servers whose steps give one token each: with drafts a time limit would meet texts that have ended."""
    return partial(serving, bundle, policy="full")


@pytest.fixture(scope="module")
def served(serve_app: Serve) -> Iterator[Served]:
    with serve_app() as live:
        yield live


def send(served: Served, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection that has sent a request and reads nothing."""
    host, _, port = served.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    raw = json.dumps({"model": served.engine.manifest.model.name, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


@contextmanager
def slowed(served: Served) -> Iterator[None]:
    """The engine takes 5 ms or more for each step, so that 500 tokens take 2.5 s on any machine."""
    step = served.engine.policy.step

    def slow_step(*arguments: Any) -> Any:
        time.sleep(0.005)
        return step(*arguments)

    served.engine.policy.step = slow_step  # type: ignore[method-assign]
    yield
    served.engine.policy.step = step  # type: ignore[method-assign]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", LONG),
        ("/v1/completions", {**LONG, "n": 3}),
        ("/v1/completions", {**LONG, "prompt": [70] * 500, "echo": True, "logprobs": 1}),
        ("/v1/responses", RESPONSE),
    ],
)
def test_hanging_up_ends_all_generations(served: Served, path: str, body: dict[str, Any], stream: bool) -> None:
    """Breaks: the engine works on for clients that are gone, whether they stream or not."""
    with slowed(served):
        connection = send(served, path, {**body, "stream": stream})
        wait_for(lambda: served.engine.stats().running > 0)
        connection.close()
        served.wait_idle(1.5)  # to the end it would take 2.5 s


def test_hanging_up_in_the_queue(serve_app: Serve) -> None:
    """Breaks: requests of clients that are gone are computed when their turn comes."""
    with serve_app(max_batch=1) as served, slowed(served):
        first = send(served, "/v1/completions", LONG)
        wait_for(lambda: served.engine.stats().running == 1)
        second = send(served, "/v1/completions", LONG)
        wait_for(lambda: served.engine.stats().waiting == 1)
        second.close()
        wait_for(lambda: served.engine.stats().waiting == 0)
        assert served.engine.stats().running == 1
        first.close()
        served.wait_idle()


def test_time_limit_ends_an_answer(serve_app: Serve) -> None:
    """Breaks: a generation runs for longer than the server allows, or what it has is thrown away for one that had no turn."""
    with serve_app(ServeConfig(request_timeout=0.6), max_batch=1) as served, slowed(served):
        answer = httpx.post(f"{served.url}/v1/completions", json=request(served, n=2)).json()
        first, second = answer["choices"]
        assert first["finish_reason"] == second["finish_reason"] == "length"
        assert len(first["text"]) > len(second["text"])  # its turn comes in the last moment, or not at all
        assert 0 < answer["usage"]["completion_tokens"] < 500


@pytest.mark.parametrize("stream", [False, True])
def test_time_limit_in_the_queue(serve_app: Serve, stream: bool) -> None:
    """Breaks: a request that never got its turn looks like an empty answer, and is not sent again."""
    with serve_app(ServeConfig(request_timeout=0.05), max_batch=1) as served, slowed(served):
        busy = served.engine.submit("def", GenerationParams(max_new_tokens=500, ignore_eos=True))
        wait_for(lambda: served.engine.stats().running == 1)
        answer = httpx.post(f"{served.url}/v1/completions", json=request(served, stream=stream))
        busy.cancel()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "timeout")
        assert int(answer.headers["retry-after"]) >= 1


def test_a_full_queue_refuses(serve_app: Serve) -> None:
    """Breaks: requests pile up without end, or the choices before the refused one run on."""
    with serve_app(max_batch=1, max_queue=2) as served, slowed(served):
        busy = served.engine.submit("def", GenerationParams(max_new_tokens=500, ignore_eos=True))
        wait_for(lambda: served.engine.stats().running == 1)
        answer = httpx.post(f"{served.url}/v1/completions", json=request(served, n=4))
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
        assert "retry-after" in answer.headers
        wait_for(lambda: served.engine.stats().waiting == 0)
        busy.cancel()


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/v1/completions", LONG, ("service_unavailable_error", "cancelled")),
        ("/v1/messages", MESSAGE, ("overloaded_error", None)),
        ("/v1/responses", RESPONSE, (None, "server_error")),
    ],
)
def test_a_stopping_server_ends_streams_with_an_error(serve_app: Serve, path: str, body: dict[str, Any], error: Any) -> None:
    """Breaks: a client takes half of a text for the whole."""
    with serve_app() as served, slowed(served):
        asked = request(served, **body, stream=True)
        with httpx.stream("POST", f"{served.url}{path}", json=asked) as answer:
            lines = answer.iter_lines()
            while "delta" not in (line := next(lines)) and '"choices"' not in line:
                pass
            served.engine.close(abort=True)
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    last = events[-1]
    assert (last.get("error") or last["response"]["error"]).items() >= {
        name: value for name, value in zip(("type", "code"), error, strict=True) if value
    }.items()
    if path == "/v1/messages":
        ErrorResponse.model_validate(last)
    elif path == "/v1/responses":
        ResponseFailedEvent.model_validate(last)
        assert events[-2]["type"] == "response.output_item.done" and last["response"]["output"][0]["status"] == "incomplete"


def test_a_stopping_server_refuses_whole_answers(serve_app: Serve) -> None:
    """Breaks: an answer that the server cut off looks complete."""
    with serve_app() as served, slowed(served), ThreadPoolExecutor() as pool:
        asked = pool.submit(httpx.post, f"{served.url}/v1/completions", json=request(served), timeout=20)
        wait_for(lambda: served.engine.stats().running == 1)
        served.engine.close(abort=True)
        answer = asked.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "cancelled")
        later = httpx.post(f"{served.url}/v1/completions", json=request(served))
        assert (later.status_code, later.json()["error"]["code"]) == (503, "engine_closed")


def test_an_error_of_the_engine_ends_a_stream(serve_app: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: a failure in the middle of a stream shows the server's inside, or no end at all."""
    with serve_app() as served, slowed(served):
        with httpx.stream("POST", f"{served.url}/v1/completions", json=request(served, stream=True)) as answer:
            lines = answer.iter_lines()
            next(lines)

            def fail(*arguments: Any) -> Any:
                raise RuntimeError("a secret of the prompt")

            monkeypatch.setattr(served.engine.policy, "step", fail)
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "internal_error" and "secret" not in last


def request(served: Served, **fields: Any) -> dict[str, Any]:
    return {"model": served.engine.manifest.model.name, **(fields if fields.keys() & {"input", "messages"} else LONG | fields)}
