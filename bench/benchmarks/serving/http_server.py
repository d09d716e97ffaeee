"""`tide-serve` in a process of its own, and a client of its completions that costs little CPU time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import count
from pathlib import Path

import psutil
from tide_bench.arms.process import ArmError

from benchmarks.serving.load import Request

_START_S, _STOP_S = 120, 60
_HOST = "127.0.0.1"
_EVENT = b"data: {"


@dataclass(frozen=True)
class Text:
    """What a client has received: ``text``, and whether the stream came to its end."""

    text: str
    finished: bool


class TideServe:
    """A running server: `benchmarks.serving.load.Server` over HTTP, streamed, greedy, past end tokens.

    Args:
        address: host and port.
        model: the name that requests give.
    """

    def __init__(self, address: str, process: psutil.Process, model: str) -> None:
        self.address = address
        self.process = process
        self.model = model
        self._salts = count()

    def stream(self, request: Request) -> Iterator[None]:
        """An item for each event, which has one token or several."""
        tokens = None
        for event in self._events(request, {"stream_options": {"include_usage": True}}):
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            elif event["choices"]:
                yield
        if tokens != request.new_tokens:
            raise ArmError(f"tide-serve made {tokens} tokens, expected {request.new_tokens}")

    def read(self, request: Request, events: int | None = None) -> Text:
        """The text; the client hangs up after so many ``events``."""
        text = ""
        for number, event in enumerate(self._events(request, {}), 1):
            text += "".join(choice["text"] for choice in event["choices"])
            if number == events:
                return Text(text, False)
        return Text(text, True)

    def metric(self, name: str) -> float:
        """A metric by its name, and its labels as the server writes them, where it has any."""
        return next(float(line.split()[1]) for line in self._get("/metrics").splitlines() if line.startswith(f"{name} "))

    def _get(self, path: str) -> str:
        connection = HTTPConnection(self.address, timeout=30)
        try:
            connection.request("GET", path)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def _events(self, request: Request, more: dict[str, object]) -> Iterator[dict]:
        body = {"model": self.model, "prompt": request.prompt, "max_tokens": request.new_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "cache_salt": f"{id(self)} {next(self._salts)}"} | more
        for line in event_lines(self.address, "/v1/completions", body, "tide-serve"):
            event = json.loads(line)
            if "error" in event:
                raise ArmError(f"tide-serve ended a stream: {event['error']}")
            yield event


def event_lines(address: str, path: str, body: Mapping[str, object], server: str) -> Iterator[bytes]:
    """The JSON of each event that comes of POSTing ``body``. Raises ArmError for an answer that is no stream."""
    connection = HTTPConnection(address, timeout=600)
    try:
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ArmError(f"{server} answers {response.status}: {response.read(300)!r}")
        yield from (line[len(_EVENT) - 1 :] for line in response if line.startswith(_EVENT))
    finally:
        connection.close()


@contextmanager
def tide_serve(bundle: Path, *options: object, name: str = "tide") -> Iterator[TideServe]:
    """``tide-serve`` on a free loopback port, until the end of the block. Raises ArmError when it does not start."""
    with socket.socket() as free:
        free.bind((_HOST, 0))
        port = free.getsockname()[1]
    arguments = [bundle, "--model-name", name, *options, "--port", port]
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "tide_serve.cli", *map(str, arguments)]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            address = f"{_HOST}:{port}"
            if not _ready(address, process):
                log.seek(0)
                raise ArmError(f"tide-serve did not start: {log.read()[-2000:]}")
            yield TideServe(address, psutil.Process(process.pid), name)
        finally:
            process.terminate()
            process.wait(_STOP_S)


def _ready(address: str, process: subprocess.Popen[bytes]) -> bool:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        connection = HTTPConnection(address, timeout=5)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return True
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    process.kill()
    return False
