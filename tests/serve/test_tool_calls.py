"""Tool calls in a model's output: found wherever the text is cut, and nothing else is taken for one."""

from __future__ import annotations

import json

import pytest
from tide_serve.tool_calls import ToolCallParser

CALL = '{"name": "f", "arguments": {"x": 1}}'
F1 = ("f", {"x": 1})
G = ("g", {})

CASES = {
    "a call": (f"<tool_call>\n{CALL}\n</tool_call>", "", [F1]),
    "a call without lines": (f"<tool_call>{CALL}</tool_call>", "", [F1]),
    "text before": (f"Let me see.\n\n<tool_call>{CALL}</tool_call>", "Let me see.", [F1]),
    "text behind": (f"<tool_call>{CALL}</tool_call>\nDone. ", "Done.", [F1]),
    "two calls": (f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "g"}}</tool_call>', "", [F1, G]),
    "a list": (f'<tool_call>[{CALL}, {{"name": "g", "arguments": {{}}}}]</tool_call>', "", [F1, G]),
    "not closed": (f"<tool_call>\n{CALL}", "", [F1]),
    "bare": (f" {CALL}\n", "", [F1]),
    "bare, as Llama 3 writes": ('{"name": "f", "parameters": {"x": 1}}', "", [F1]),
    "braces in a string": ('<tool_call>{"name": "f", "arguments": {"x": "</tool"}}</tool_call>', "", [("f", {"x": "</tool"})]),
    "plain text": ("Hello <b>there</b> ", "Hello <b>there</b> ", []),
    "only space": ("  \n", "  \n", []),
    "part of a tag": ("a < b <tool", "a < b <tool", []),
    "cut off": ('Hm. <tool_call>\n{"name": "f", "argu', 'Hm.<tool_call>\n{"name": "f", "argu', []),
    "not JSON": ("<tool_call>f(1)</tool_call> so", "<tool_call>f(1)</tool_call> so", []),
    "another function": ('<tool_call>{"name": "h"}</tool_call>', '<tool_call>{"name": "h"}</tool_call>', []),
    "arguments are no object": ('{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": [1]}', []),
    "JSON that is no call": ('{"name": "Paris", "size": 2}', '{"name": "Paris", "size": 2}', []),
    "JSON behind text": (f"See {CALL}", f"See {CALL}", []),
    "another object": ('{"nam": 1}', '{"nam": 1}', []),
}


def split(pieces: list[str]) -> tuple[str, list[tuple[str, object]]]:
    parser = ToolCallParser({"f", "g"})
    parts = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    calls = [call for _, found in parts for call in found]
    assert calls == parser.calls and len({call.id for call in calls}) == len(calls)
    return "".join(text for text, _ in parts), [(call.name, json.loads(call.arguments)) for call in calls]


@pytest.mark.parametrize("pieces", ["whole", "characters", "threes"])
@pytest.mark.parametrize(("output", "text", "calls"), CASES.values(), ids=CASES.keys())
def test_split_of_an_output(output: str, text: str, calls: list[object], pieces: str) -> None:
    """Breaks: a call is shown as text, text is lost, or a stream has other calls than the whole answer."""
    size = {"whole": len(output), "characters": 1, "threes": 3}[pieces]
    assert split([output[i : i + size] for i in range(0, len(output), size)]) == (text, calls)


def test_text_is_not_held_back_longer_than_needed() -> None:
    """Breaks: with tools, a stream shows nothing until it ends."""
    parser = ToolCallParser({"f"})
    assert parser.feed("The")[0] == "The"
    assert parser.feed(" sky <")[0] == " sky"
    assert parser.feed("b>")[0] == " <b>"
    assert parser.feed(' {"name": "f"')[0] == ' {"name": "f"'


def test_calls_come_when_they_are_complete() -> None:
    """Breaks: a client that runs tools in parallel waits for the last of them."""
    parser = ToolCallParser({"f"})
    assert [call.name for call in parser.feed(f"<tool_call>{CALL}</tool_call>\n<tool")[1]] == ["f"]
