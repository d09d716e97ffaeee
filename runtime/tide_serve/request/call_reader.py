"""Reads one call, or one JSON value of calls, in a form of `call_formats`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tide_serve.request.call_formats import COUNT, ID, KEY, NAME, CallForm, ToolCall, Value, pieces
from tide_serve.request.call_values import NoCall, as_object, dumped, parameter_value, parsed, python_arguments, quoted_object

Tools = Mapping[str, Mapping[str, Any]]  # name → JSON schema of the parameters; empty: not known
_SPACE = re.compile(r"\s*")
_SEPARATORS = re.compile(r"[\s;,]*")
_NAME = re.compile(r"[\w-]*")
_ITEM_NAME = re.compile(r"[^\s\"'<>=:/]*")
_WILD = {ID: re.compile(r"[\w:.-]*"), COUNT: re.compile(r"\d*"), NAME: _NAME}
_JSON_PARTS = re.compile(r'"(?:[^"\\]++|\\.)*+"|["{}\[\]]', re.DOTALL)
_PYTHON_PARTS = re.compile(_JSON_PARTS.pattern + r"""|'(?:[^'\\]++|\\.)*+'|['()]""", re.DOTALL)
_DEPTHS = {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}
_NAME_KEYS = {"name", "id", "type", "index", "tool_call_id"}  # an object with other keys and no arguments is data
_ARGUMENTS = ("arguments", "parameters")
_CDATA = "<![CDATA["


class Unfinished(Exception):
    """More text may make it a call."""


class Reading:
    """A position in a text. Its methods raise `Unfinished` where more text decides, and `NoCall`.

    Args:
        ended: no more text will come. A closing tag that a model leaves out there, or a limit of tokens cuts off, is not missed.
    """

    def __init__(self, text: str, at: int, tools: Tools, ended: bool) -> None:
        self.text, self.at, self.tools, self.ended = text, at, tools, ended

    def consumes(self, literal: str, key: str = "") -> bool:
        """Move past white space and ``literal``, if they are next. ``key``: the item's name."""
        at = self.at
        for piece in pieces(literal):
            at = _SPACE.match(self.text, at).end()  # type: ignore[union-attr]
            if piece in _WILD:
                at = _WILD[piece].match(self.text, at).end()  # type: ignore[union-attr]
                continue
            piece = piece.replace(KEY, key)
            if not self.text.startswith(piece, at):
                if not self.ended and piece.startswith(self.text[at : at + len(piece)]):
                    raise Unfinished
                return False
            at += len(piece)
        self.at = at
        return True

    def closes(self, literal: str) -> bool:
        """`consumes`, and at the end of the text a part of ``literal`` will do."""
        if self.consumes(literal):
            return True
        rest = self.text[_SPACE.match(self.text, self.at).end() :]  # type: ignore[union-attr]
        cut_off = self.ended and "".join(pieces(literal)).startswith("".join(rest.split()))
        self.at = len(self.text) if cut_off else self.at
        return cut_off

    def word(self, pattern: re.Pattern[str]) -> str:
        """The next word."""
        begin = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
        self.at = pattern.match(self.text, begin).end()  # type: ignore[union-attr]
        return self.text[begin : self.at]

    def name(self) -> tuple[str, Mapping[str, Any]]:
        """The name of a tool, and the JSON schema of its parameters."""
        name = self.word(_NAME)
        if self.at == len(self.text) and not self.ended and any(tool.startswith(name) for tool in self.tools):
            raise Unfinished
        return name, self.schema(name)

    def call(self, name: str, arguments: Any) -> ToolCall:
        """A call of tool ``name``; one that takes no arguments gets none, whatever a model makes up."""
        schema, given = self.schema(name), as_object(arguments)
        takes_none = schema.get("additionalProperties") is False and not schema.get("properties")
        return ToolCall(name, "{}" if takes_none else dumped(given))

    def schema(self, name: str) -> Mapping[str, Any]:
        if name not in self.tools:
            raise NoCall
        return self.tools[name]

    def following(self) -> str:
        """The next character after white space; empty at the end of the text."""
        begin = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
        return self.text[begin : begin + 1]

    def json(self) -> Any:
        """The JSON object or list that is next."""
        return parsed(self.enclosed("{["))

    def enclosed(self, openings: str = "{", quote: str = "") -> str:
        """The text that is next from a bracket of ``openings`` to the one that closes it."""
        if not (bracket := self.following()):
            raise Unfinished
        if bracket not in openings:
            raise NoCall
        begin = self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
        self.at = self._closing(
            re.compile(f"{re.escape(quote)}.*?{re.escape(quote)}|[{{}}\\[\\]]", re.DOTALL) if quote else _JSON_PARTS, 0
        )
        return self.text[begin : self.at]

    def python(self) -> str:
        """The text up to the parenthesis that closes."""
        begin = self.at
        self.at = self._closing(_PYTHON_PARTS, 1) - 1
        return self.text[begin : self.at]

    def _closing(self, parts: re.Pattern[str], depth: int) -> int:
        """Behind the bracket that closes ``depth`` brackets, or the one that is next."""
        for part in parts.finditer(self.text, self.at):
            if part[0] in ('"', "'"):  # of a string that goes on
                break
            depth += _DEPTHS.get(part[0], 0)
            if depth == 0:
                return part.end()
        raise Unfinished


def read_calls(form: CallForm, reading: Reading) -> list[ToolCall]:
    """The call behind ``open``, or those of the JSON value there; moves past ``close`` too.

    Raises `Unfinished` where more text may make it a call, and `NoCall` where none can.
    """
    calls = _json_calls(form, reading) if form.as_json is not None else [_call(form, reading)]
    close = pieces(form.call_close)
    if close and not reading.closes(close[0]) and not _begins_another(form, reading):
        raise NoCall
    return calls


def _begins_another(form: CallForm, reading: Reading) -> bool:
    at = reading.at
    another = bool(form.call_open.strip()) and reading.consumes(form.call_open)
    reading.at = at
    return another


def _call(form: CallForm, reading: Reading) -> ToolCall:
    name, schema = reading.name()
    has_mark, arguments = reading.consumes(form.named), form.arguments
    if not has_mark and not (arguments.kind == "items" and form.close and reading.consumes(pieces(form.close)[0])):
        raise NoCall
    if not has_mark:
        reading.at -= len(pieces(form.close)[0])
        return ToolCall(name, "{}")
    if arguments.kind == "json":
        return reading.call(name, reading.json())
    if arguments.kind == "python":
        return reading.call(name, python_arguments(reading.python(), schema))
    if arguments.kind == "quoted":
        return reading.call(name, quoted_object(reading.enclosed("{", arguments.quote), arguments.quote))
    return reading.call(name, _items(form, reading, schema))


# --- JSON


def _json_calls(form: CallForm, reading: Reading) -> list[ToolCall]:
    """A list of objects, or objects one after the other."""
    value = reading.json()
    if isinstance(value, list):
        return [call for each in value for call in _calls_of(each, form, reading)]
    calls = _calls_of(value, form, reading)
    while True:
        begin = _SEPARATORS.match(reading.text, reading.at).end()  # type: ignore[union-attr]
        if begin == len(reading.text) and not reading.ended:
            raise Unfinished
        if not reading.text.startswith("{", begin):
            return calls
        reading.at = begin
        calls += _calls_of(reading.json(), form, reading)


def _calls_of(value: Any, form: CallForm, reading: Reading) -> list[ToolCall]:
    keys = form.as_json
    assert keys is not None
    if not isinstance(value, dict):
        raise NoCall
    value = value[keys.inside] if keys.inside and isinstance(value.get(keys.inside), dict) else value
    if not keys.name and all(name in reading.tools for name in value):
        return [reading.call(name, arguments) for name, arguments in value.items()]
    if keys.name in value and keys.name != "name":
        value = {"name": value[keys.name], "arguments": value.get(keys.arguments)}
    elif "name" not in value:  # {"type": "function", "function": …} with an object or a name
        value = value["function"] if isinstance(value.get("function"), dict) else {"name": value.get("function"), **value}
    if not isinstance(value.get("name"), str):
        raise NoCall
    given = [value[key] for key in (keys.arguments, *_ARGUMENTS) if key in value]
    if not given and not value.keys() <= _NAME_KEYS:
        raise NoCall
    return [reading.call(value["name"], given[0] if given else None)]


# --- items


def _items(form: CallForm, reading: Reading, schema: Mapping[str, Any]) -> dict[str, Any]:
    form_of, arguments = form.arguments, dict[str, Any]()
    while (at := reading.at) >= 0 and reading.consumes(form_of.key_open):
        name = reading.word(_ITEM_NAME)
        if reading.at == len(reading.text):
            raise Unfinished
        if not name:  # the mark that closes the call begins like one that opens an item
            reading.at = at
            break
        around = next((value for value in form_of.values if reading.consumes(value.before)), None)
        if around is None:
            raise NoCall
        text = _text_of_item(form, reading, around, name)
        arguments[name] = _value(text, around, name, schema)
        if form_of.sep.strip():
            reading.consumes(form_of.sep)
    return arguments


def _value(text: str, around: Value, name: str, schema: Mapping[str, Any]) -> Any:
    """The value ``text``, whose type the marks around it or the schema say."""
    if text.startswith(_CDATA) and text.endswith("]]>"):
        return text[len(_CDATA) : -3]
    if around.types == ("string",):
        return text
    of_marks = around.types and "string" not in around.types
    return parameter_value(text, name, {"properties": {name: {"type": [*around.types]}}} if of_marks else schema)


def _text_of_item(form: CallForm, reading: Reading, around: Value, name: str) -> str:
    """The text of a value; moves past what stands after it, which an item or the call's end must follow."""
    if around.before.endswith("\n"):
        if reading.at == len(reading.text) and not reading.ended:
            raise Unfinished
        reading.at += reading.text.startswith("\n", reading.at)
    begin = reading.at
    mark = pieces(around.after)[0].replace(KEY, name)
    while (at := reading.text.find(mark, reading.at)) >= 0:
        reading.at = at
        if reading.consumes(around.after, name) and _ends_item(form, reading):
            text = reading.text[begin:at]
            return text.removesuffix("\n") if around.after.startswith("\n") else text
        reading.at = at + len(mark)
    raise Unfinished


def _ends_item(form: CallForm, reading: Reading) -> bool:
    at = reading.at
    follows = [form.arguments.sep + form.arguments.key_open, *pieces(form.close or form.end)[:1]]
    ends = any(reading.consumes(literal) for literal in follows) or (reading.ended and not reading.following())
    reading.at = at
    return ends
