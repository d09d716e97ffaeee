"""How a server ends: signals to a process of its own, without a model."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from serve.http.processes import ROOT, end_of
from slow_cases import slow_but
from tide_serve.http.server import _ONE_SIGNAL_S

LONG = 600  # seconds that no test waits for
# A program that hands its file descriptor over and becomes Python with the other arguments.
HAND_OVER = """import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"""


@contextmanager
def server(
    drain_timeout: float, name: str = "stub", handed: socket.socket | None = None
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A running server's address and process; it has to end by itself. ``handed``: its socket, as systemd hands it over."""
    paths = {"PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("runtime", "tests"))}
    handing = [] if handed is None else ["-c", HAND_OVER, str(handed.fileno())]
    process = subprocess.Popen(
        [sys.executable, *handing, "-m", "serve.http.stub_process", str(drain_timeout), name],
        env={**os.environ, **paths},
        pass_fds=() if handed is None else [handed.fileno()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http"), process.communicate(timeout=30)[1]
        yield url, process
    finally:
        process.kill()
        process.communicate()


def start(pool: ThreadPoolExecutor, client: httpx.Client, until: Path | None = None) -> Future[httpx.Response]:
    """A request whose answer ends when the file ``until`` is there, once the server has begun to answer it."""
    running = pool.submit(client.post, f"/v1/wait/{LONG}", params={} if until is None else {"until": str(until)})
    wait_until(lambda: "in_progress 1.0" in client.get("/metrics").text)
    return running


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, "what the test waits for has not come in 30 s"
        time.sleep(0.01)


def test_sigterm_lets_answers_finish_and_refuses_new_requests(tmp_path: Path) -> None:
    """Breaks: each rolling update cuts off answers and streams, or fails the requests that come meanwhile."""
    with server(LONG) as (url, process), ThreadPoolExecutor() as pool, httpx.Client(base_url=url, timeout=60) as client:
        running = start(pool, client, tmp_path / "end")
        stream = pool.submit(httpx.post, f"{url}/v1/events", params={"until": str(tmp_path / "end")}, timeout=60)
        wait_until(lambda: "in_progress 2.0" in client.get("/metrics").text)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/ready").status_code == 503)
        refused = httpx.post(f"{url}/v1/count", json={}, timeout=60)  # over a new connection
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert client.get("/health").status_code == 200
        (tmp_path / "end").touch()
        assert running.result().json() == {"cut_short": False}
        assert stream.result().text.endswith("word end")
        code, log = end_of(process)
    assert code == 0
    assert {f"/v1/wait/{LONG}", "/v1/events", "/v1/count"} <= {line.get("path") for line in log}


def test_what_takes_longer_than_the_drain_timeout_ends_with_what_it_has() -> None:
    """Breaks: a long answer keeps a server from ending, or its client gets a broken connection instead of the part there is."""
    with server(0.2) as (url, process), ThreadPoolExecutor() as pool, httpx.Client(base_url=url, timeout=60) as client:
        running = start(pool, client)
        process.send_signal(signal.SIGTERM)
        assert running.result().json() == {"cut_short": True}
        assert end_of(process)[0] == 0


def test_second_signal_ends_the_server_at_once() -> None:
    """Breaks: an operator in a hurry has to find the process and kill it."""
    with server(LONG) as (url, process), ThreadPoolExecutor() as pool, httpx.Client(base_url=url, timeout=60) as client:
        running = start(pool, client)
        for _ in range(2):  # of the same moment: `timeout` sends one to the process and one to its group
            process.send_signal(signal.SIGINT)
        wait_until(lambda: client.get("/ready").status_code == 503)
        time.sleep(_ONE_SIGNAL_S)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        code, log = end_of(process)
        assert code == 128 + signal.SIGINT
        assert (running.result().status_code, running.result().json()["error"]["code"]) == (503, "cancelled")
    said = f"waits for 1 answers, {LONG} s at most; a second signal ends the server at once"
    assert [line["message"] for line in log if "message" in line] == [said]


@pytest.mark.parametrize("answers", slow_but([0, 1], 1))
def test_second_signal_ends_a_server_whose_step_hangs(answers: int) -> None:
    """Breaks: a server whose device hangs waits for it for ever, whatever signals an operator sends."""
    with server(0.2) as (url, process), ThreadPoolExecutor() as pool, httpx.Client(base_url=url, timeout=60) as client:
        client.post("/v1/hang")
        running = [start(pool, client) for _ in range(answers)]
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/health").status_code == 503)  # the engine is to be closed
        time.sleep(_ONE_SIGNAL_S)
        process.send_signal(signal.SIGTERM)
        code, log = end_of(process)
        assert all(answer.exception() is not None or answer.result().status_code >= 500 for answer in running)
    assert code == 128 + signal.SIGTERM
    assert [line.get("path") for line in log].count(f"/v1/wait/{LONG}") == answers


@pytest.mark.slow
def test_the_next_server_takes_over_the_socket_without_a_refused_connection(tmp_path: Path) -> None:
    """Breaks: an update cuts off streams, or fails requests that come while no server or two servers run."""
    with socket.create_server(("127.0.0.1", 0)) as handed, ThreadPoolExecutor() as pool:
        with server(LONG, "old", handed) as (url, old):
            stream = pool.submit(httpx.post, f"{url}/v1/events", params={"until": str(tmp_path / "end")}, timeout=60)
            with httpx.Client(base_url=url) as client:
                wait_until(lambda: "in_progress 1.0" in client.get("/metrics").text)
            with server(LONG, "new", handed) as (_, new):
                old.send_signal(signal.SIGTERM)
                # Until the old server's next tick both accept.
                wait_until(lambda: all(new_connections_reach(url, "new") for _ in range(10)))
                (tmp_path / "end").touch()
                assert stream.result().text.endswith("word end")
                assert end_of(old)[0] == 0
                new.send_signal(signal.SIGTERM)
                assert end_of(new)[0] == 0
        waits = pool.submit(httpx.post, f"{url}/v1/name", timeout=60)  # no server runs
        with server(LONG, "next", handed):
            assert waits.result().json() == "next"


def new_connections_reach(url: str, name: str) -> bool:
    """Whether the server ``name`` answers. The one that ends refuses with 503 what it has accepted; nothing else is right."""
    answer = httpx.post(f"{url}/v1/name", timeout=60)
    assert answer.status_code == 200 or (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    return answer.status_code == 200 and answer.json() == name
