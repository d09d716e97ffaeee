"""ray_failover: how it judges what clients get."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tide_bench.load import Request

from benchmarks.serving.answers_tally import Got, Tally, ask, under_load

REQUEST = Request(0.0, [1, 2], 3)
EVENT = b'data: {"choices": [{"text": "ab"}]}\n\n'


@contextmanager
def _answering(status: int, kind: str, body: bytes) -> Iterator[str]:
    """A server that answers everything with ``body`` and closes the connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("streamed", "status", "body", "got"),
    [
        (False, 200, b'{"choices": [{"text": "abab"}]}', Got("abab", "whole")),
        (False, 200, b'{"choices": [{"te', Got("", "nothing")),
        (False, 503, b'{"error": {"message": "lost"}}', Got("", "error")),
        (False, 500, b"Internal Server Error", Got("", "nothing")),
        (True, 200, EVENT + EVENT + b"data: [DONE]\n\n", Got("abab", "whole")),
        (True, 200, EVENT + b'data: {"error": {"message": "lost"}}\n\n', Got("ab", "error")),
        (True, 200, EVENT, Got("ab", "nothing")),
        (True, 200, EVENT + b'data: {"choi', Got("ab", "nothing")),
        (True, 503, b'{"error": {"message": "lost"}}', Got("", "error")),
    ],
)
def test_what_an_answer_is_taken_for(streamed, status, body, got):
    """Breaks: an answer that just stops counts as whole, or a clear error as none."""
    with _answering(status, "text/event-stream" if streamed else "application/json", body) as address:
        assert ask(address, REQUEST, streamed) == got


def test_no_server_is_no_answer():
    """Breaks: the benchmark ends with the first refused connection."""
    with _answering(200, "", b"") as address:
        pass
    assert ask(address, REQUEST, streamed=False) == Got("", "nothing")


@pytest.mark.parametrize(
    ("got", "mixed"),
    [
        (Got("abcd", "whole"), False),
        (Got("abab", "whole"), True),
        (Got("ab", "whole"), True),  # an answer that lost its end is not whole
        (Got("abcdabcd", "whole"), True),
        (Got("ab", "error"), False),
        (Got("b", "error"), True),
        (Got("", "nothing"), False),
        (Got("abcde", "nothing"), True),
    ],
)
def test_only_the_known_text_is_not_mixed(got, mixed):
    """Breaks: a text that two replicas have written together counts as right."""
    tally = Tally(["other", "abcd"], [(1, got)])
    assert (tally.mixed, tally.right) == (mixed, got == Got("abcd", "whole"))


def test_all_requests_are_sent_in_both_ways():
    """Breaks: only streams are tested, or only some of the prompts."""
    with (
        _answering(200, "application/json", b'{"choices": [{"text": "x"}]}') as address,
        under_load(address, [REQUEST, REQUEST], ["x", "x"], clients=2) as tally,
    ):
        while len(tally.answers) < 8:
            time.sleep(0.01)
    assert {number for number, _ in tally.answers} == {0, 1}
    assert tally.whole and tally.unanswered  # the server's document is not a stream
