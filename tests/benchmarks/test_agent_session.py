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
from benchmarks.serving.agent_script import Turn, session, tools

CALL, TEXT = Turn("Read a.py", must_call=True, max_tokens=8), Turn("Explain", must_call=False, max_tokens=8)
ARGUMENTS = '{"path": "a.py"}'


def _delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields}]}


def _piece(**fields: Any) -> dict[str, Any]:
    return _delta(tool_calls=[{"index": 0, **fields}])


def _usage(prompt: int, new: int, cached: int) -> dict[str, Any]:
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": new, **details}}


def _block(**fields: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": 0, "content_block": fields}


def _part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": 0, "delta": {"type": kind, **fields}}


def _start(**usage: int) -> dict[str, Any]:
    return {"type": "message_start", "message": {"usage": {**usage, "output_tokens": 0}}}


def _end(reason: str, new: int) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": new}}


ANSWERS: dict[str, list[list[dict[str, Any]]]] = {
    "chat": [
        [
            _delta(role="assistant", content=""),
            _piece(id="c1", function={"name": "read", "arguments": ARGUMENTS[:4]}),
            _piece(function={"arguments": ARGUMENTS[4:]}),
            _usage(50, 9, 0),
        ],
        [_delta(content="It "), _delta(content="adds."), _usage(70, 4, 48)],
    ],
    "messages": [
        [
            _start(input_tokens=50),
            _block(type="tool_use", id="c1", name="read"),
            _part("input_json_delta", partial_json=ARGUMENTS[:4]),
            _part("input_json_delta", partial_json=ARGUMENTS[4:]),
            _end("tool_use", 9),
        ],
        [
            _start(input_tokens=22, cache_read_input_tokens=48),
            _block(type="text", text=""),
            _part("text_delta", text="It "),
            _part("text_delta", text="adds."),
            _end("end_turn", 4),
        ],
    ],
}
HISTORY: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Read a.py"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "read", "arguments": ARGUMENTS}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "Explain"},
    ],
    "messages": [
        {"role": "user", "content": "Read a.py"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "read", "input": {"path": "a.py"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "Explain"}]},
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
        agent = DIALECTS[dialect](address, "m", "Be brief.", tools())
        called, text = agent.ask(CALL), agent.ask(TEXT)
    assert [(call.name, call.arguments) for call in called.calls] == [("read", ARGUMENTS)] and called.first_text_s is None
    assert (text.text, text.calls) == ("It adds.", []) and text.first_text_s is not None
    figures = [(one.prompt_tokens, one.cached_tokens, one.new_tokens) for one in (called, text)]
    assert figures == [(50, 0, 9), (70, 48, 4)]
    assert bodies[1]["messages"] == HISTORY[dialect]
    assert len(bodies[1]["tools"]) == len(tools()) and bodies[0]["temperature"] == 0


@pytest.mark.parametrize("events", [[{"error": {"message": "lost"}}], ANSWERS["chat"][1]])
def test_a_failed_answer_ends_the_session(events: list[dict[str, Any]]) -> None:
    """A session of refusals and broken streams would be the fastest one."""
    with _answering([events]) as (address, _), pytest.raises(ArmError, match=r"lost|call was required"):
        DIALECTS["chat"](address, "m", "", tools()).ask(CALL)


def test_a_call_that_was_cut_off_is_text() -> None:
    """The next turn would be refused, as its history has a call whose arguments are no JSON."""
    cut = [_piece(id="c1", function={"name": "read", "arguments": ARGUMENTS[:4]}), _usage(50, 8, 0)]
    with _answering([cut, cut]) as (address, bodies):
        agent = DIALECTS["chat"](address, "m", "", tools())
        assert (agent.ask(TEXT).text, agent.ask(TEXT).calls) == (f"read {ARGUMENTS[:4]}", [])
    assert [message["role"] for message in bodies[1]["messages"]] == ["system", "user", "assistant", "user"]


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
    assert len(script.turns) == 20 and sum(turn.must_call for turn in script.turns) == 10
    excerpts = [turn.text for turn in script.turns[1::4]]
    assert len(set(excerpts)) == 5 and all(300 < len(tokenizer.encode(text).ids) <= 500 for text in excerpts)
    assert {name for tool in tools() for name in tool["schema"]["required"]} == {"path", "part", "status", "file", "next"}
