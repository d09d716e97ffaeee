"""What clients get while replicas of a server are lost or replaced: each answer beside the known one of its prompt."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from itertools import count
from typing import Literal

from tide_bench.load import Request

_TIMEOUT_S = 120


@dataclass(frozen=True)
class Got:
    """What a client has received of an answer.

    Args:
        end: ``whole``: the answer came to its end; ``error``: an error object that says why not came in its place or behind
            its beginning; ``nothing``: neither.
    """

    text: str
    end: Literal["whole", "error", "nothing"]

    def is_mixed(self, expected: str) -> bool:
        """Whether there is anything but the ``expected`` text in it, once and from its beginning."""
        return self.text != expected if self.end == "whole" else not expected.startswith(self.text)


@dataclass
class Tally:
    """Answers so far, and of how many of them each thing is true.

    Args:
        expected: the text of each request on an idle engine.
    """

    expected: Sequence[str]
    answers: list[tuple[int, Got]] = field(default_factory=list)

    @property
    def whole(self) -> int:
        return sum(got.end == "whole" for _, got in self.answers)

    @property
    def errors(self) -> int:
        return sum(got.end == "error" for _, got in self.answers)

    @property
    def unanswered(self) -> int:
        return sum(got.end == "nothing" for _, got in self.answers)

    @property
    def right(self) -> int:
        """Whole, and the expected text."""
        return sum(got.end == "whole" and not got.is_mixed(self.expected[number]) for number, got in self.answers)

    @property
    def mixed(self) -> int:
        return sum(got.is_mixed(self.expected[number]) for number, got in self.answers)


@contextmanager
def under_load(address: str, requests: Sequence[Request], expected: Sequence[str], clients: int) -> Iterator[Tally]:
    """Clients that send ``requests`` over and over until the end of the block, every other one streamed, each client its next
    one after an answer. The tally is complete behind the block."""
    tally, numbers, stop = Tally(expected), count(), threading.Event()

    def client() -> None:
        while not stop.is_set():
            number = next(numbers)
            place = number // 2 % len(requests)
            tally.answers.append((place, ask(address, requests[place], streamed=number % 2 == 0)))

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(client) for _ in range(clients)]
        try:
            yield tally
        finally:
            stop.set()
    for one in running:
        one.result()


def ask(address: str, request: Request, streamed: bool) -> Got:
    """One greedy completion."""
    body = {"model": "tide", "prompt": request.prompt, "max_tokens": request.new_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": streamed}
    connection = HTTPConnection(address, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return _read_stream(response) if streamed and response.status == 200 else _read_document(response)
    except (OSError, HTTPException, ValueError):
        return Got("", "nothing")
    finally:
        connection.close()


def _read_document(response: HTTPResponse) -> Got:
    document = json.loads(response.read())
    if response.status == 200:
        return Got(document["choices"][0]["text"], "whole")
    return Got("", "error" if document.get("error", {}).get("message") else "nothing")


def _read_stream(response: HTTPResponse) -> Got:
    text = ""
    try:
        for line in response:
            if line.startswith(b"data: [DONE]"):
                return Got(text, "whole")
            if line.startswith(b"data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    return Got(text, "error")
                text += "".join(choice["text"] for choice in event["choices"])
    except (OSError, HTTPException, ValueError):  # a line that was cut
        pass
    return Got(text, "nothing")
