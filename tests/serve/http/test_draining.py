"""How a server ends: signals to a process of its own, without a model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
from serve.http.processes import ROOT, end_of

LONG = 600  # seconds that no test waits for


@contextmanager
def server(drain_timeout: float) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A running server's address and process; it has to end by itself."""
    paths = {"PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("runtime", "tests"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "serve.http.stub_process", str(drain_timeout)],
        env={**os.environ, **paths},
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
    """Breaks: each rolling update cuts off answers, or fails the requests that come meanwhile."""
    with server(LONG) as (url, process), ThreadPoolExecutor() as pool, httpx.Client(base_url=url, timeout=60) as client:
        running = start(pool, client, tmp_path / "end")
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/ready").status_code == 503)
        refused = httpx.post(f"{url}/v1/count", json={}, timeout=60)  # over a new connection
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert client.get("/health").status_code == 200
        (tmp_path / "end").touch()
        assert running.result().json() == {"cut_short": False}
        code, log = end_of(process)
    assert code == 0
    assert {f"/v1/wait/{LONG}", "/v1/count"} <= {line["path"] for line in log}


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
        process.send_signal(signal.SIGINT)
        wait_until(lambda: client.get("/ready").status_code == 503)
        process.send_signal(signal.SIGINT)
        assert end_of(process)[0] == 128 + signal.SIGINT
        assert running.exception() is not None or running.result().status_code >= 500


def test_idle_server_ends_at_once_in_spite_of_open_connections() -> None:
    """Breaks: clients that keep connections open hold up every restart."""
    with server(LONG) as (url, process), httpx.Client(base_url=url, timeout=60) as client:
        client.get("/health")
        process.send_signal(signal.SIGTERM)
        code, log = end_of(process)
    assert (code, log) == (0, [])
