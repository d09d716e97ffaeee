"""Clients of examples/serve_fastapi.py: many at once, some of which hang up in the middle, each answer kept token by token."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

SERVER = Path(__file__).resolve().parents[2] / "examples" / "serve_fastapi.py"
_START_S = 120


@dataclass(frozen=True)
class ClientRequest:
    """One request. ``hang_up_after``: tokens after which the client goes away; None: it stays to the end."""

    prompt: list[int]
    new_tokens: int
    hang_up_after: int | None = None


@dataclass(frozen=True)
class Answer:
    """``tokens``: as they came; ``finished``: whether the last line ends the answer; seconds since the request was sent."""

    tokens: list[int]
    finished: bool
    first_token_s: float
    seconds: float


@contextmanager
def serving(bundle: Path, policy: str = "auto", at_once: int = 4) -> Iterator[tuple[str, psutil.Process]]:
    """The example's server in a process of its own: its address, and the process. Raises RuntimeError when it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SERVER), str(bundle), "--port", str(port), "--policy", policy, "--at-once", str(at_once)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, process)
        yield url, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def send_all(url: str, requests: Sequence[ClientRequest], clients: int) -> list[Answer]:
    """All of ``requests``, ``clients`` at once; answers in their order."""
    with httpx.Client(timeout=300, limits=httpx.Limits(max_connections=clients)) as client, ThreadPoolExecutor(clients) as pool:
        return list(pool.map(lambda request: send(client, url, request), requests))


def send(client: httpx.Client, url: str, request: ClientRequest) -> Answer:
    """One request. Raises httpx.HTTPStatusError when it is refused."""
    body = {"prompt": request.prompt, "max_new_tokens": request.new_tokens, "ignore_eos": True}
    start, first, tokens, finished = time.perf_counter(), 0.0, list[int](), False
    with client.stream("POST", f"{url}/generate", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            entry = json.loads(line)
            first = first or time.perf_counter() - start
            tokens.append(entry["token"])
            finished = "done" in entry
            if len(tokens) == request.hang_up_after:
                break
    return Answer(tokens, finished, first, time.perf_counter() - start)


def wrong_answers(requests: Sequence[ClientRequest], answers: Sequence[Answer], alone: Sequence[Sequence[int]]) -> list[int]:
    """Numbers of the answers that differ from the same prompt's answer on an idle engine (``alone``)."""
    wrong = []
    for number, (request, answer, tokens) in enumerate(zip(requests, answers, alone, strict=True)):
        expected = tokens[: request.hang_up_after or request.new_tokens]
        if answer.tokens != list(expected) or answer.finished != (request.hang_up_after in (None, request.new_tokens)):
            wrong.append(number)
    return wrong


def _wait_for(url: str, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            httpx.get(f"{url}/health", timeout=5).raise_for_status()
            return
        except httpx.TransportError:
            time.sleep(0.1)
    process.kill()
    output = process.stdout.read() if process.stdout is not None else ""
    raise RuntimeError(f"the server did not start: {output[-2000:]}")
