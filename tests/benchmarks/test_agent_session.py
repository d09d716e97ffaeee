"""agent_session: the session that both servers get, how answers are read, and what counts as computed twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tide_bench.arms.process import ArmError
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.agent_session import Run
from benchmarks.serving.agent_dialects import DIALECTS, Answer
from benchmarks.serving.agent_script import READ, Turn, session

CALL, TEXT = Turn("Read a.py", 8, READ), Turn("Explain", 8)


def _delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields}]}


def _usage(prompt: int, new: int, cached: int) -> dict[str, Any]:
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": new, **details}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}


def _start(**usage: int) -> dict[str, Any]:
    return {"type": "message_start", "message": {"usage": {**usage, "output_tokens": 0}}}


def _end(**usage: int) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}


ANSWERS: dict[str, list[list[dict[str, Any]]]] = {
    "chat": [
        [_delta(role="assistant", content=""), _delta(content="{}"), _usage(50, 9, 0)],
        [_delta(role="assistant", content=None), _delta(content="It "), _delta(content="adds."), _usage(70, 4, 48)],
    ],
    "messages": [
        [_start(input_tokens=50), _text("{}"), _end(output_tokens=9)],  # llama.cpp's server says at once what it has cached
        [
            _start(input_tokens=70),
            _text("It "),
            _text("adds."),
            _end(input_tokens=22, cache_read_input_tokens=48, output_tokens=4),
        ],
    ],
}


@contextmanager
def _answering(answers: list[list[dict[str, Any]]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a server that streams each of ``answers`` once, and the bodies that it got."""
    bodies, waiting = list[dict[str, Any]](), iter(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write("".join(f"data: {json.dumps(event)}\n\n" for event in next(waiting)).encode())

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", bodies
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_both_dialects_hold_the_same_conversation(dialect: str) -> None:
    """A history without the answer, or a figure that is another one in this dialect, would compare unlike sessions."""
    with _answering(ANSWERS[dialect]) as (address, bodies):
        agent = DIALECTS[dialect](address, "m", "Be brief.")
        called, text = agent.ask(CALL), agent.ask(TEXT)
    assert (called.text, text.text) == ("{}", "It adds.") and 0 < text.first_s <= text.seconds
    figures = [(one.prompt_tokens, one.cached_tokens, one.new_tokens) for one in (called, text)]
    assert figures == [(50, 0, 9), (70, 48, 4)]
    said = [(message["role"], message["content"]) for message in bodies[1]["messages"] if message["role"] != "system"]
    assert said == [("user", "Read a.py"), ("assistant", "{}"), ("user", "Explain")]
    assert "Be brief." in json.dumps(bodies[1]) and bodies[1]["temperature"] == 0
    assert ["response_format" in body for body in bodies] == [dialect == "chat", False]


@pytest.mark.parametrize("events", [[{"error": {"message": "lost"}}], [_usage(50, 1, 0)], [_delta(content="It ")]])
def test_a_failed_answer_ends_the_session(events: list[dict[str, Any]]) -> None:
    """A session of refusals and broken streams would be the fastest one."""
    with _answering([events]) as (address, _), pytest.raises(ArmError, match=r"lost|no text, or without"):
        DIALECTS["chat"](address, "m", "").ask(TEXT)


def test_what_counts_as_computed_twice() -> None:
    """New tokens of a turn would count as computed again, or the unfinished blocks of a cache as nothing."""

    def answer(prompt: int, cached: int, new: int) -> Answer:
        return Answer(prompt_tokens=prompt, cached_tokens=cached, new_tokens=new)

    run = Run([answer(100, 0, 21), answer(160, 112, 41), answer(250, 200, 10)])
    assert (run.recomputed, run.tokens) == (120 - 112, 260)


def test_the_session_is_20_turns_of_texts_of_this_repository() -> None:
    """A file that was moved would end the benchmark, or an agent without files, edits and reports would be measured."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    script = session(tokenizer)
    assert len(script.turns) == 20 and sum(turn.schema is not None for turn in script.turns) == 10
    excerpts = [turn.text for turn in script.turns[1::4]]
    assert len(set(excerpts)) == 5 and all(300 < len(tokenizer.encode(text).ids) <= 510 for text in excerpts)
    assert "read_file" in script.system and "Where things are" in script.system
