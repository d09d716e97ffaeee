"""The forms in which models write calls of tools.

A reader gets the text after a form's opening. It returns the calls there and moves past them, or raises `Unfinished` where more
text may make it a call, and `NoCall` where none can.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

OPENING, CLOSING = "<tool_call>", "</tool_call>"
Tools = Mapping[str, Mapping[str, Any]]  # name → JSON schema of the parameters; empty: not known
_SPACE = re.compile(r"\s*")
_SEPARATORS = re.compile(r"[\s;,]*")
_NAME = re.compile(r"[\w.-]*")
_JSON_PARTS = re.compile(r'"(?:[^"\\]++|\\.)*+"|["{}\[\]]', re.DOTALL)
_VALUE_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))")
_PYTHON_CALL = re.compile(r"([\w-]+)(?:\.call)?\(")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LONGEST_NAME = 256
_NAME_KEYS = {"name", "id", "type", "index"}  # an object with other keys and no arguments is data
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
_DEPTH = 8  # references and combinations of a schema that are followed


class Unfinished(Exception):
    """More text may make it a call."""


class NoCall(Exception):
    """It is not a call of one of the tools."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a function; ``arguments``: a JSON object (RFC 8259) in UTF-8."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")

    def body(self) -> dict[str, Any]:
        """The call as OpenAI's API has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Reading:
    """A position in a text.

    Args:
        ended: no more text will come. A closing tag that a model leaves out there, or a limit of tokens cuts off, is not missed.
    """

    def __init__(self, text: str, at: int, tools: Tools, ended: bool) -> None:
        self.text, self.at, self.tools, self.ended = text, at, tools, ended

    def consumes(self, literal: str) -> bool:
        """Move past white space and ``literal``, if they are next."""
        begin = self.skipped(_SPACE)
        if self.text.startswith(literal, begin):
            self.at = begin + len(literal)
            return True
        if not self.ended and literal.startswith(self.text[begin:]):
            raise Unfinished
        return False

    def closes(self, literal: str) -> bool:
        """`consumes`, and at the end of the text a part of ``literal`` will do."""
        if self.consumes(literal):
            return True
        cut_off = self.ended and literal.startswith(self.text[self.skipped(_SPACE) :])
        self.at = len(self.text) if cut_off else self.at
        return cut_off

    def up_to(self, mark: str) -> str:
        """The name before ``mark``, without white space; moves past the mark."""
        head, found, _ = self.text[self.at : self.at + _LONGEST_NAME].partition(mark)
        if not found:
            raise Unfinished if len(self.text) - self.at < _LONGEST_NAME else NoCall
        self.at += len(head) + len(mark)
        return head.strip()

    def json(self) -> Any:
        """The JSON object or list that is next."""
        begin = self.skipped(_SPACE)
        if begin == len(self.text):
            raise Unfinished
        if self.text[begin] not in "{[":
            raise NoCall
        self.at = _json_end(self.text, begin)
        return _parsed(self.text[begin : self.at])

    def schema(self, name: str) -> Mapping[str, Any]:
        """The JSON schema of the parameters of tool ``name``."""
        if name not in self.tools:
            raise NoCall
        return self.tools[name]

    def skipped(self, pattern: re.Pattern[str]) -> int:
        """Where the ``pattern``, which may be empty, ends."""
        return pattern.match(self.text, self.at).end()  # type: ignore[union-attr]

    def following(self) -> str:
        """The next character after white space; empty at the end of the text."""
        begin = self.skipped(_SPACE)
        return self.text[begin : begin + 1]


def read_json(reading: Reading) -> list[ToolCall]:
    """A list of objects with ``name`` and ``arguments``, or such objects one after the other."""
    value = reading.json()
    if isinstance(value, list):
        return [_call(each, reading) for each in value]
    calls = [_call(value, reading)]
    while True:
        begin = reading.skipped(_SEPARATORS)
        if begin == len(reading.text) and not reading.ended:
            raise Unfinished
        if not reading.text.startswith("{", begin):
            return calls
        reading.at = begin
        calls.append(_call(reading.json(), reading))


def read_tagged(reading: Reading) -> list[ToolCall]:
    """Hermes and Qwen: JSON, or functions in XML, up to ``</tool_call>``."""
    calls = read_json(reading) if reading.following() in ("{", "[") else read_functions(reading)
    end = reading.at
    if not reading.closes(CLOSING):
        if not reading.consumes(OPENING):
            raise NoCall
        reading.at = end
    return calls


def read_functions(reading: Reading) -> list[ToolCall]:
    """Qwen3-Coder: ``<function=name>`` with ``<parameter=name>value</parameter>``; Llama 3: the same with JSON."""
    calls = []
    while reading.consumes("<function="):
        name = reading.up_to(">")
        schema = reading.schema(name)
        arguments = _object(reading.json()) if reading.following() == "{" else _parameters(reading, schema)
        if not reading.closes("</function>"):
            raise NoCall
        calls.append(ToolCall(name, _dumped(arguments)))
    if not calls:
        raise NoCall
    return calls


def read_named(reading: Reading) -> list[ToolCall]:
    """Mistral: JSON, or ``name[ARGS]{…}``."""
    if reading.following() in ("", "{", "["):
        return read_json(reading)
    begin = reading.skipped(_SPACE)
    name = _NAME.match(reading.text, begin)[0]  # type: ignore[index]
    reading.at = begin + len(name)
    if reading.at == len(reading.text) and any(tool.startswith(name) for tool in reading.tools):
        raise Unfinished
    reading.schema(name)
    if reading.consumes("[CALL_ID]"):
        reading.at = reading.skipped(_NAME)
    reading.consumes("[ARGS]")
    return [ToolCall(name, _dumped(_object(reading.json())))]


def read_python(reading: Reading) -> list[ToolCall]:
    """Llama 3: JSON, or ``name.call(argument=value)``, which is the rest of the output."""
    if reading.following() in ("{", "["):
        return read_json(reading)
    rest = reading.text[reading.at :].strip()
    head = _PYTHON_CALL.match(rest)
    if head is None:
        raise Unfinished if any(f"{name}.call(".startswith(rest) for name in reading.tools) else NoCall
    schema = reading.schema(head[1])
    if not reading.ended:
        raise Unfinished
    reading.at = len(reading.text)
    return [ToolCall(head[1], _dumped(_python_arguments(rest[head.end() :], schema)))]


def read_deepseek(reading: Reading) -> list[ToolCall]:
    """DeepSeek: calls with a name and JSON; in R1 and V3 ``function`` stands before the name, and the JSON is a code block."""
    calls = []
    while reading.consumes("<｜tool▁call▁begin｜>"):
        name = reading.up_to("<｜tool▁sep｜>")
        fenced = name == "function" and reading.following() != "{"
        if fenced:
            name = reading.up_to("\n")
            reading.consumes("```json")
        reading.schema(name)
        calls.append(ToolCall(name, _dumped(_object(reading.json()))))
        if fenced:
            reading.closes("```")
        reading.closes("<｜tool▁call▁end｜>")
    if not calls:
        raise NoCall
    reading.closes("<｜tool▁calls▁end｜>")
    return calls


# Opening → whether the reader wants it itself, and the reader.
FORMS: dict[str, tuple[bool, Callable[[Reading], list[ToolCall]]]] = {
    OPENING: (False, read_tagged),
    "<function=": (True, read_functions),
    "[TOOL_CALLS]": (False, read_named),
    "<|python_tag|>": (False, read_python),
    "<｜tool▁calls▁begin｜>": (False, read_deepseek),
    "<｜tool▁call▁begin｜>": (True, read_deepseek),
}
# Some tokenizers have these as special tokens, which texts leave out unless `GenerationParams.shown_tokens` has them.
TAGS = (
    *FORMS, CLOSING, "[ARGS]", "[CALL_ID]", "<parameter=", "</parameter>", "</function>",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
)  # fmt: skip


def _json_end(text: str, begin: int) -> int:
    """Where the JSON object or list at ``begin`` ends."""
    depth = 0
    for part in _JSON_PARTS.finditer(text, begin):
        if part[0] == '"':  # of a string that goes on
            break
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(part[0], 0)
        if depth == 0:
            return part.end()
    raise Unfinished


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, strict=False)  # models write line breaks into strings
    except (ValueError, RecursionError) as error:
        raise NoCall from error


def _call(value: Any, reading: Reading) -> ToolCall:
    if isinstance(value, dict) and "name" not in value:  # {"type": "function", "function": …} with an object or a name
        value = value["function"] if isinstance(value.get("function"), dict) else {"name": value.get("function"), **value}
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise NoCall
    reading.schema(value["name"])
    given = [value[key] for key in ("arguments", "parameters") if key in value]
    if not given and not value.keys() <= _NAME_KEYS:
        raise NoCall
    return ToolCall(value["name"], _dumped(_object(given[0] if given else None)))


def _object(arguments: Any) -> dict[str, Any]:
    """The arguments, which may be JSON in a string."""
    if isinstance(arguments, str):
        arguments = _parsed(arguments) if arguments.strip() else None
    if arguments is not None and not isinstance(arguments, dict):
        raise NoCall
    return arguments or {}


def _parameters(reading: Reading, schema: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {}
    while reading.consumes("<parameter="):
        name = reading.up_to(">")
        end = _VALUE_END.search(reading.text, reading.at)
        if end is None:
            raise Unfinished
        arguments[name] = parameter_value(reading.text[reading.at : end.start()].removeprefix("\n"), name, schema)
        reading.at = end.end()
    return arguments


def _python_arguments(rest: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the Python call whose text after the parenthesis is ``rest``; those without a name have the schema's."""
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or None in [word.arg for word in call.keywords]:
            raise NoCall
        unnamed = dict(zip([*schema.get("properties", {})][: len(call.args)], call.args, strict=True))
        named = unnamed | {str(word.arg): word.value for word in call.keywords}
        return {name: ast.literal_eval(value) for name, value in named.items()}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise NoCall from error


def _dumped(arguments: dict[str, Any]) -> str:
    """``arguments`` as JSON. Numbers that JSON has not, NaN and infinities, are null, as JavaScript writes them."""
    try:
        text = json.dumps(arguments, ensure_ascii=False)
        if "NaN" in text or "Infinity" in text:
            text = json.dumps(json.loads(text, parse_constant=lambda name: None), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise NoCall from error
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


# --- values of parameters that a model writes as bare text


def parameter_value(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """The value of parameter ``name`` in ``schema``; ``text`` itself where it is a string there, or has none of its types."""
    properties = schema.get("properties")
    parameter = properties.get(name) if isinstance(properties, Mapping) else None
    types = set(_types(parameter, schema, _DEPTH))
    for read in (json.loads, ast.literal_eval) if types - {"string"} else ():
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if any(_is(value, kind) for kind in types):
            return int(value) if isinstance(value, float) and "number" not in types else value
    return text


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):  # which is an int to Python
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return kind in _TYPES and isinstance(value, _TYPES[kind])


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
    """Names of the types that ``schema`` allows."""
    if not isinstance(schema, Mapping) or depth == 0:
        return
    kind = schema.get("type")
    yield from (name for name in ("string", *_TYPES) if name == kind or (isinstance(kind, list) and name in kind))
    if kind is None:
        values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
        yield from (name for value in values for name in _TYPES if _is(value, name))
    for part in (part for key in ("anyOf", "oneOf", "allOf") for part in _list(schema.get(key))):
        yield from _types(part, root, depth - 1)
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        yield from _types(target, root, depth - 1)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
