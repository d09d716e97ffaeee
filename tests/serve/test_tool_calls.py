"""Tool calls in a model's output: found wherever the text is cut, and nothing else is taken for one."""

import json
from pathlib import Path

import pytest
from tide_runtime.text.thoughts import ThoughtMarks, ThoughtSplitter
from tide_serve.request.answer_parser import AnswerParser
from tide_serve.request.tool_calls import ToolCallParser, split_calls

CALL = '{"name": "f", "arguments": {"x": 1}}'
XML = "<tool_call>\n<function=typed>\n{}</function>\n</tool_call>"
# What a model may write: output, its text, its calls.
CASES = json.loads(Path(__file__).with_name("calls.json").read_text(encoding="utf-8"))["outputs"]
SCHEMA = {
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "r": {"type": "number"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "l": {"$ref": "#/$defs/list"},
        "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "e": {"enum": [1, 2, "x"]},
        "u": {"type": ["integer", "string"]},
        "any": {},
        "odd": {"type": {}, "anyOf": 5, "$ref": "#/x/y"},
    },
    "$defs": {"list": {"type": "array"}},
}
TOOLS = {"f": {}, "g": {}, "typed": SCHEMA}


def split(pieces: list[str]) -> tuple[str, list[list[object]]]:
    parser = ToolCallParser(TOOLS)
    parts = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    calls = [call for _, found in parts for call in found]
    assert calls == parser.calls and len({call.id for call in calls}) == len(calls)
    return "".join(text for text, _ in parts), [[call.name, json.loads(call.arguments)] for call in calls]


@pytest.mark.parametrize("pieces", ["whole", "characters", "threes"])
@pytest.mark.parametrize(("output", "text", "calls"), CASES.values(), ids=CASES.keys())
def test_split_of_an_output(output: str, text: str, calls: list[object], pieces: str) -> None:
    """Breaks: a call is shown as text, text is lost, or a stream has other calls than the whole answer."""
    size = {"whole": max(1, len(output)), "characters": 1, "threes": 3}[pieces]
    assert split([output[i : i + size] for i in range(0, len(output), size)]) == (text, calls)


def test_text_is_not_held_back_longer_than_needed() -> None:
    """Breaks: with tools, a stream shows nothing until it ends."""
    parser = ToolCallParser({"f"})
    assert parser.feed("The")[0] == "The"
    assert parser.feed(" sky <")[0] == " sky "
    assert parser.feed("b>")[0] == "<b>"
    assert parser.feed(' {"name": "f"')[0] == ' {"name": "f"'


def test_calls_come_when_they_are_complete() -> None:
    """Breaks: a client that runs tools in parallel waits for the last of them."""
    parser = ToolCallParser({"f"})
    assert [call.name for call in parser.feed(f"<tool_call>{CALL}</tool_call>\n<tool")[1]] == ["f"]
    assert [call.name for call in ToolCallParser({"f"}).feed(f"[TOOL_CALLS][{CALL}]")[1]] == ["f"]


def test_json_that_is_no_call_is_shown_as_it_comes() -> None:
    """Breaks: an answer in JSON, beside tools, is held back to its end."""
    assert ToolCallParser({"f"}).feed('{"name": "Rome"')[0] == '{"name": "Rome"'
    assert ToolCallParser({"f"}).feed("<tool_call>\n<function=h>")[0] == "<tool_call>\n<function=h>"


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"x": NaN}', '{"x": null}'),
        ('{"x": [-Infinity, 1e999, -1e999]}', '{"x": [null, null, null]}'),
        ('{"x": "NaN"}', '{"x": "NaN"}'),
        ('{"x": 12345678901234567890123}', '{"x": 12345678901234567890123}'),
        ('{"x": "\\ud83d"}', '{"x": "\\ud83d"}'),
        ('{"\\udc00": "\\ud83d\\ude00é"}', '{"\\udc00": "😀é"}'),
        ('{"x": "\\\\ud83d"}', '{"x": "\\\\ud83d"}'),
    ],
)
@pytest.mark.parametrize("form", ['<tool_call>{{"name": "f", "arguments": {}}}</tool_call>', "[TOOL_CALLS]f[ARGS]{}"])
def test_arguments_are_json_in_utf8(form: str, written: str, arguments: str) -> None:
    """Breaks: a client's JSON parser refuses the arguments, or the answer cannot be encoded and is an error 500."""
    _, [call] = split_calls(form.format(written), {"f"})
    assert call.arguments == arguments and call.arguments.encode("utf-8")
    json.loads(call.arguments, parse_constant=pytest.fail)


@pytest.mark.parametrize("number", ["9" * 5000, "1e" + "9" * 400])
def test_numbers_beyond_every_limit(number: str) -> None:
    """Breaks: a number that Python does not read is an error 500."""
    text = f'<tool_call>{{"name": "f", "arguments": {{"x": {number}}}}}</tool_call>'
    shown, calls = split_calls(text, {"f"})
    assert (shown, calls) == (text, []) or json.loads(calls[0].arguments) == {"x": None}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("s", "5", "5"), ("s", "null", "null"), ("s", "", ""), ("s", "\na\n\n", "\na\n\n"), ("s", "é{", "é{"),
        ("n", "5", 5), ("n", " 5 ", 5), ("n", "5.0", 5), ("n", "5.5", "5.5"), ("n", "five", "five"), ("n", "true", "true"),
        ("r", "5", 5), ("r", "-1.5e3", -1500.0), ("r", "NaN", None),
        ("b", "true", True), ("b", "True", True), ("b", "1", "1"),
        ("o", '{"a": [1]}', {"a": [1]}), ("o", "{'a': None}", {"a": None}), ("o", "[1]", "[1]"),
        ("l", "[1, 2]", [1, 2]), ("m", "null", None), ("m", "Rome", "Rome"), ("m", "5", "5"),
        ("e", "2", 2), ("e", "x", "x"), ("u", "7", 7), ("u", "a7", "a7"),
        ("any", "5", "5"), ("odd", "5", "5"), ("unknown", "5", "5"),
    ],
)  # fmt: skip
def test_values_have_the_types_of_the_schema(name: str, text: str, value: object) -> None:
    """Breaks: Qwen3-Coder's numbers and objects reach the client's function as strings, or its strings as numbers."""
    _, [call] = split_calls(XML.format(f"<parameter={name}>\n{text}\n</parameter>\n"), TOOLS)
    assert json.loads(call.arguments) == {name: value} and call.name == "typed"
    assert type(json.loads(call.arguments)[name]) is type(value)


def test_one_call_where_there_may_be_no_other() -> None:
    """Breaks: with parallel_tool_calls false, a client gets two calls, or text behind the one."""
    text = f"So. <tool_call>{CALL}</tool_call> and <tool_call>{CALL}</tool_call>"
    shown, calls = split_calls(text, {"f"}, max_calls=1)
    assert (shown, len(calls)) == ("So. ", 1)
    parser = ToolCallParser({"f"}, max_calls=1)
    assert "".join(parser.feed(letter)[0] for letter in text) + parser.finish()[0] == shown and len(parser.calls) == 1
    assert len(split_calls(f"[{CALL}, {CALL}]", {"f"}, max_calls=1)[1]) == 1


def test_tags_that_are_special_tokens_are_not_text() -> None:
    """Breaks: a special token that begins no call is shown to the client, who never sees others."""
    assert split_calls("<|python_tag|>print(1) [TOOL_CALLS]", {"f"}, hidden=["<|python_tag|>"]) == ("print(1) [TOOL_CALLS]", [])


def test_a_long_call_takes_time_in_proportion() -> None:
    """Breaks: each token of a long argument reads all of it again, and a stream gets slower and slower."""
    parser = ToolCallParser({"f"})
    parser.feed('<tool_call>{"name": "f", "arguments": {"x": "')
    for _ in range(20000):
        assert parser.feed("word ") == ("", [])
    assert len(json.loads(parser.feed('"}}</tool_call>')[1][0].arguments)["x"]) == 100000


def test_tags_in_an_answer_are_hidden_wherever_its_stream_is_cut() -> None:
    """Breaks: a client sees a piece of a tag, which a stop string such as ">>>" has had held back until the next token."""
    text, tags = "Well<think>a > b</think></tool_call>.", ["<think>", "</think>"]
    for at in range(len(text)):
        splitter, tools = ThoughtSplitter(ThoughtMarks(*tags), begun=False), ToolCallParser({"f"}, ["</tool_call>"])
        parser = AnswerParser(splitter, tools, tags)
        parts = parser.feed(text[:at]), parser.feed(text[at:], last=True)
        assert "".join(part.text for part in parts) == "Wella > b.", at
