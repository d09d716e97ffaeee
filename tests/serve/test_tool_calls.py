"""Tool calls in a model's output: found wherever the text is cut, and nothing else is taken for one."""

import json

import pytest
from tide_serve.request.tool_calls import ToolCallParser, split_calls

CALL = '{"name": "f", "arguments": {"x": 1}}'
F1 = ("f", {"x": 1})
G = ("g", {})
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
R1 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
XML = "<tool_call>\n<function=typed>\n{}</function>\n</tool_call>"

CASES = {
    "a call": (f"<tool_call>\n{CALL}\n</tool_call>", "", [F1]),
    "a call without lines": (f"<tool_call>{CALL}</tool_call>", "", [F1]),
    "text before": (f"Let me see.\n\n<tool_call>{CALL}</tool_call>", "Let me see.\n\n", [F1]),
    "text behind": (f"<tool_call>{CALL}</tool_call>\nDone. ", "\nDone. ", [F1]),
    "text on both sides": (f" A <tool_call>{CALL}</tool_call> B\n", " A  B\n", [F1]),
    "two calls": (f'\n<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "g"}}</tool_call>\n ', "", [F1, G]),
    "a list": (f'<tool_call>[{CALL}, {{"name": "g", "arguments": {{}}}}]</tool_call>', "", [F1, G]),
    "two in a block": (f"<tool_call>\n{CALL}\n{CALL}\n</tool_call>", "", [F1, F1]),
    "not closed": (f"<tool_call>\n{CALL}", "", [F1]),
    "closed by half": (f"<tool_call>\n{CALL}\n</tool_", "", [F1]),
    "the next one closes": (f"<tool_call>\n{CALL}\n<tool_call>\n{CALL}\n</tool_call>", "", [F1, F1]),
    "bare": (f" {CALL}\n", "", [F1]),
    "bare, as Llama 3 writes": ('{"name": "f", "parameters": {"x": 1}}', "", [F1]),
    "bare, with a type": ('{"type": "function", "name": "f", "parameters": {"x": 1}}', "", [F1]),
    "bare, as OpenAI writes": ('{"type": "function", "function": {"name": "f", "arguments": "{\\"x\\": 1}"}}', "", [F1]),
    "bare, a function for a name": ('{"type": "function", "function": "f", "parameters": {"x": 1}}', "", [F1]),
    "bare, arguments first": ('{"arguments": {"name": "Rome"}, "name": "f"}', "", [("f", {"name": "Rome"})]),
    "bare, several": (f"{CALL}; {CALL}", "", [F1, F1]),
    "a bare list": (f'[{CALL},\n {{"name": "g"}}] ', "", [F1, G]),
    "braces in a string": ('<tool_call>{"name": "f", "arguments": {"x": "</tool"}}</tool_call>', "", [("f", {"x": "</tool"})]),
    "a tag in a string": (
        '<tool_call>{"name": "f", "arguments": {"x": "\\"}</tool_call><tool_call>"}}</tool_call> ok',
        " ok",
        [("f", {"x": '"}</tool_call><tool_call>'})],
    ),
    "a line break in a string": ('<tool_call>{"name": "f", "arguments": {"x": "a\nb"}}</tool_call>', "", [("f", {"x": "a\nb"})]),
    "arguments in a string": ('{"name": "f", "arguments": "{\\"x\\": 1}"}', "", [F1]),
    "an empty string for arguments": ('<tool_call>{"name": "g", "arguments": ""}</tool_call>', "", [G]),
    "null for arguments": ('<tool_call>{"name": "g", "arguments": null}</tool_call>', "", [G]),
    "Mistral's list": (f"[TOOL_CALLS][{CALL}, {CALL}]", "", [F1, F1]),
    "Mistral's list with spaces": (f"Hm.[TOOL_CALLS] [ {CALL} ]</s>", "Hm.</s>", [F1]),
    "Mistral's arguments": ('[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}', "", [F1, G]),
    "Mistral's ids": ('[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"x": 1}', "", [F1]),
    "Mistral's arguments without a sign": ('[TOOL_CALLS]f{"x": 1}', "", [F1]),
    "Mistral's other function": ('[TOOL_CALLS]h[ARGS]{"x": 1}', '[TOOL_CALLS]h[ARGS]{"x": 1}', []),
    "Mistral's, cut off": ('[TOOL_CALLS]f[ARGS]{"x": ', '[TOOL_CALLS]f[ARGS]{"x": ', []),
    "Llama's tag": ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}', "", [F1]),
    "Llama's tag, several": ('<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}', "", [F1, G]),
    "Llama's tools": ("<|python_tag|>f.call(x=1)", "", [F1]),
    "Llama's tools, other values": (
        '<|python_tag|>f.call(a="b)", b=[1, None], c=True)', "", [("f", {"a": "b)", "b": [1, None], "c": True})]
    ),
    "Llama's tools, by place": ('<|python_tag|>typed.call("Rome", n=2)', "", [("typed", {"s": "Rome", "n": 2})]),
    "Llama's code": ("<|python_tag|>import math\nprint(1)", "<|python_tag|>import math\nprint(1)", []),
    "Llama's expression": ("<|python_tag|>f.call(x=g())", "<|python_tag|>f.call(x=g())", []),
    "Llama's other tool": ("<|python_tag|>h.call(x=1)", "<|python_tag|>h.call(x=1)", []),
    "Llama's functions": ('<function=f>{"x": 1}</function>', "", [F1]),
    "DeepSeek R1": ("So.\n" + DEEPSEEK.format(R1.format("f", '{"x": 1}') + "\n" + R1.format("g", "{}")), "So.\n", [F1, G]),
    "DeepSeek V3.1": (DEEPSEEK.format(V31.format("f", '{"x": 1}') + V31.format("g", "{}")), "", [F1, G]),
    "DeepSeek, not closed": (DEEPSEEK.format(R1.format("f", '{"x": 1}')).partition("``<")[0], "", [F1]),
    "DeepSeek, one call": (V31.format("f", '{"x": 1}') + " ok", " ok", [F1]),
    "DeepSeek's other function": (DEEPSEEK.format(V31.format("h", "{}")), DEEPSEEK.format(V31.format("h", "{}")), []),
    "Qwen's XML": (XML.format("<parameter=s>\n a\n<b> \n</parameter>\n"), "", [("typed", {"s": " a\n<b> "})]),
    "Qwen's XML, tags in a value": (
        XML.format("<parameter=s>\n</tool_call> </parameter>x\n</parameter>\n"),
        "",
        [("typed", {"s": "</tool_call> </parameter>x"})],
    ),
    "Qwen's XML without parameters": ("<tool_call>\n<function=g>\n</function>\n</tool_call>", "", [G]),
    "Qwen's XML without a block": ("Hm.\n<function=g></function>\n</tool_call", "Hm.\n", [G]),
    "Qwen's XML, cut off": ("<tool_call>\n<function=f>\n<parameter=s>\nab", "<tool_call>\n<function=f>\n<parameter=s>\nab", []),
    "Qwen's XML, another function": (
        "<tool_call>\n<function=h>\n</function>\n</tool_call>", "<tool_call>\n<function=h>\n</function>\n</tool_call>", []
    ),
    "plain text": ("Hello <b>there</b> ", "Hello <b>there</b> ", []),
    "only space": ("  \n", "  \n", []),
    "nothing": ("", "", []),
    "part of a tag": ("a < b <tool", "a < b <tool", []),
    "cut off": ('Hm. <tool_call>\n{"name": "f", "argu', 'Hm. <tool_call>\n{"name": "f", "argu', []),
    "not JSON": ("<tool_call>f(1)</tool_call> so", "<tool_call>f(1)</tool_call> so", []),
    "more than JSON": (f"<tool_call>{CALL}, so</tool_call>", f"<tool_call>{CALL}, so</tool_call>", []),
    "another function": ('Hi <tool_call>\n{"name": "h"}\n</tool_call> ', 'Hi <tool_call>\n{"name": "h"}\n</tool_call> ', []),
    "one of two is another": (f'[{CALL}, {{"name": "h"}}]', f'[{CALL}, {{"name": "h"}}]', []),
    "arguments are no object": ('{"name": "f", "arguments": [1]}', '{"name": "f", "arguments": [1]}', []),
    "arguments are no JSON": ('{"name": "f", "arguments": "x=1"}', '{"name": "f", "arguments": "x=1"}', []),
    "JSON that is no call": ('{"name": "Paris", "size": 2}', '{"name": "Paris", "size": 2}', []),
    "JSON with the name of a function": ('{"name": "f", "size": 2}', '{"name": "f", "size": 2}', []),
    "JSON behind text": (f"See {CALL}", f"See {CALL}", []),
    "JSON before text": (f"{CALL} is it", f"{CALL} is it", []),
    "another object": ('{"nam": 1}', '{"nam": 1}', []),
    "a list of data": ('[{"name": "Rome"}, 2]', '[{"name": "Rome"}, 2]', []),
    "a false tag before a call": (f"Use <tool_call> so: <tool_call>{CALL}</tool_call>", "Use <tool_call> so: ", [F1]),
    "deep": ("<tool_call>" + "[" * 5000, "<tool_call>" + "[" * 5000, []),
}  # fmt: skip
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


def split(pieces: list[str]) -> tuple[str, list[tuple[str, object]]]:
    parser = ToolCallParser(TOOLS)
    parts = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    calls = [call for _, found in parts for call in found]
    assert calls == parser.calls and len({call.id for call in calls}) == len(calls)
    return "".join(text for text, _ in parts), [(call.name, json.loads(call.arguments)) for call in calls]


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
    shown, calls = split_calls(text, {"f"}, most=1)
    assert (shown, len(calls)) == ("So. ", 1)
    parser = ToolCallParser({"f"}, most=1)
    assert "".join(parser.feed(letter)[0] for letter in text) + parser.finish()[0] == shown and len(parser.calls) == 1
    assert len(split_calls(f"[{CALL}, {CALL}]", {"f"}, most=1)[1]) == 1


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
