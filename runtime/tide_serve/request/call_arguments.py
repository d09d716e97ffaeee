"""Encodings of a call's arguments: how each is written, read, and enforced by a grammar."""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tide_runtime.text.grammar import JSON_STYLE

from tide_serve.request.call_reader import KEY, NoCall, Reading, Unfinished, parsed, pieces
from tide_serve.request.call_values import parameter_value, texts_of, types_of

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_DEFINITIONS = ("$defs", "definitions")
_ITEM_NAME = re.compile(r"[^\s\"'<>=:/]*")
_BARE_KEY = re.compile(r"[^\s{}\[\],:]+(?=\s*:)")
_PYTHON_NAME = re.compile(r"\b(?:None|True|False)\b(?!\s*:)")
_JSON_NAMES = {"true": True, "false": False, "null": None}  # some templates write them into Python calls
_CDATA = "<![CDATA["
Function = Mapping[str, Any]


def in_lark(text: str) -> str:
    """``text`` as a literal of Lark, which is spelled like a string of JSON."""
    return json.dumps(text, ensure_ascii=False)


def parameters_of(function: Function) -> dict[str, Any]:
    """The schema of the arguments of ``function``, which takes none where it has no ``parameters``."""
    return {"type": "object", **function["parameters"]} if function.get("parameters") else _NO_PARAMETERS


def styled(schema: Mapping[str, Any], separators: tuple[str, str] = (", ", ": "), lenient: bool = False) -> str:
    """``schema`` with JSON on one line, unless a template indents it: without free white space most of a call follows from it."""
    style = {**JSON_STYLE, "item_separator": separators[0], "key_separator": separators[1]}
    if "\n" in separators[0]:  # a template that indents it
        style = {"whitespace_flexible": True}
    return json.dumps({**schema, "x-guidance": {**style, "lenient": lenient}})


class MarkedText(Protocol):
    """Literals in Lark, whose marks may be tokens."""

    def text(self, literal: str) -> str:
        """``literal``; empty: there is none."""

    def text_up_to(self, rule: str, literal: str) -> Iterator[str]:
        """The rule ``rule`` for any text up to ``literal``, which is a part of it."""


class Arguments(ABC):
    """An encoding."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Literals around names and values."""
        return ()

    @abstractmethod
    def text(self, arguments: Mapping[str, Any]) -> str:
        """``arguments`` as a model writes them."""

    @abstractmethod
    def read(self, reading: Reading, schema: Mapping[str, Any], close: str) -> Any:
        """The arguments of a tool with parameters of ``schema``; ``close`` is next behind them. Raises NoCall and Unfinished."""

    @abstractmethod
    def rules(self, grammar: MarkedText, function: Function, name: str) -> Iterator[str]:
        """The rule ``name`` for the arguments of ``function``, and those that it needs, whose names begin with it."""

    def shared_rules(self, grammar: MarkedText) -> Iterator[str]:
        """Rules that the arguments of all functions need."""
        return iter(())


@dataclass(frozen=True)
class Json(Arguments):
    """A JSON object. ``separators``: between its members, and between name and value."""

    separators: tuple[str, str] = (", ", ": ")

    def text(self, arguments: Mapping[str, Any]) -> str:
        return json.dumps(arguments, ensure_ascii=False, separators=self.separators)

    def read(self, reading: Reading, schema: Mapping[str, Any], close: str) -> Any:
        return reading.json()

    def rules(self, grammar: MarkedText, function: Function, name: str) -> Iterator[str]:
        # Keywords that llguidance lacks are left out of a schema that is not strict: the call still parses.
        yield f"{name}: %json {styled(parameters_of(function), self.separators, lenient=not function.get('strict'))}"


class Series(Arguments):
    """Arguments one after the other, in a grammar in the schema's order."""

    def rules(self, grammar: MarkedText, function: Function, name: str) -> Iterator[str]:
        schema = parameters_of(function)
        begin, sep, end = map(grammar.text, self._frame)
        yield f"{name}: {begin} {name}_head0 {end}"
        properties = schema.get("properties") or {}
        for i, (key, value) in enumerate(properties.items()):
            # What may come from argument i on: ``head`` where none came before, ``more`` where one did.
            item = f"{name}_{i}"
            more = f"{name}_more{i + 1}"
            needed = key in (schema.get("required") or ())
            yield f"{name}_head{i}: {item} {more}" + ("" if needed else f" | {name}_head{i + 1}")
            yield f"{name}_more{i}: {sep} {item} {more}" + ("" if needed else f" | {more}")
            yield from self._item_rules(grammar, item, key, value, schema)
        yield from (f"{name}_{kind}{len(properties)}: " for kind in ("head", "more"))

    @property
    @abstractmethod
    def _frame(self) -> tuple[str, str, str]:
        """What stands before, between and behind the arguments."""

    @abstractmethod
    def _item_rules(self, grammar: MarkedText, rule: str, key: str, value: Any, root: Mapping[str, Any]) -> Iterator[str]:
        """The rule ``rule`` for the argument ``key``, whose schema ``value`` is a part of ``root``."""


@dataclass(frozen=True)
class Literals(Series):
    """Arguments of a Python call, or of an object whose keys have no quotes and whose strings stand between ``quote``."""

    quote: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.quote,)

    @property
    def _frame(self) -> tuple[str, str, str]:
        return ("{", ",", "}") if self.quote else ("", ", ", "")

    def text(self, arguments: Mapping[str, Any]) -> str:
        if self.quote:
            return self._value(arguments)
        return ", ".join(f"{name}={value!r}" for name, value in arguments.items())

    def _value(self, value: Any) -> str:
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{name}:{self._value(each)}" for name, each in value.items()) + "}"
        if isinstance(value, list):
            return f"[{','.join(map(self._value, value))}]"
        return f"{self.quote}{value}{self.quote}" if isinstance(value, str) else json.dumps(value)

    def read(self, reading: Reading, schema: Mapping[str, Any], close: str) -> Any:
        if not self.quote:
            return _python_arguments(reading.python(), schema)
        parts = reading.enclosed("{", self.quote).split(self.quote)
        return parsed("".join(json.dumps(part) if i % 2 else _as_json(part) for i, part in enumerate(parts)))

    def _item_rules(self, grammar: MarkedText, rule: str, key: str, value: Any, root: Mapping[str, Any]) -> Iterator[str]:
        quote = grammar.text(self.quote)
        if self.quote:
            spelled = [f"{quote} {in_lark(choice)} {quote}" for choice in texts_of(value)]
        else:
            spelled = [in_lark(spell(choice)) for choice in texts_of(value) for spell in (in_lark, repr)]
        spelled = spelled or [f"any_{kind}" for kind in sorted({*types_of(value, root)})]
        yield f"{rule}: {in_lark(key + (':' if self.quote else '='))} ({' | '.join(spelled or ['any_value'])})"

    def shared_rules(self, grammar: MarkedText) -> Iterator[str]:
        """Rules for values of every type."""
        quote, comma, colon = grammar.text(self.quote), *((",", ":") if self.quote else (", ", ": "))
        yield "any_value: any_string | any_number | any_boolean | any_null | any_array | any_object"
        yield from (f'any_{kind}: %json {{"type": "{kind}"}}' for kind in ("number", "integer"))
        yield 'any_boolean: "true" | "false"' if self.quote else 'any_boolean: "True" | "False"'
        yield 'any_null: "null" | "None"' if self.quote else 'any_null: "None"'
        yield f'any_array: "[" (any_value ({in_lark(comma)} any_value)*)? "]"'
        yield f'any_object: "{{" (any_member ({in_lark(comma)} any_member)*)? "}}"'
        yield f"any_member: {'/[a-zA-Z0-9_.-]+/' if self.quote else 'any_string'} {in_lark(colon)} any_value"
        if not self.quote:
            yield r"any_string: any_json | /'[^'\\\n]*'/"
            yield 'any_json: %json {"type": "string"}'
        else:
            yield f"any_string: {quote} any_text"
            yield from grammar.text_up_to("any_text", self.quote)


def _python_arguments(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the Python call with ``text`` between its parentheses; those without a name have the schema's."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or None in [word.arg for word in call.keywords]:
            raise NoCall
        unnamed = dict(zip([*schema.get("properties", {})][: len(call.args)], call.args, strict=True))
        named = unnamed | {str(word.arg): word.value for word in call.keywords}
        return {name: ast.literal_eval(_JsonNames().visit(value)) for name, value in named.items()}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise NoCall from error


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _as_json(text: str) -> str:
    """Text between the strings of an object whose keys have no quotes."""
    text = _PYTHON_NAME.sub(lambda name: json.dumps(ast.literal_eval(name[0])), text)
    return _BARE_KEY.sub(lambda key: json.dumps(key[0]), text)


@dataclass(frozen=True)
class Value:
    """What stands before and after the value of an item.

    Args:
        types: JSON types of the values that these stand around; empty: all, so the type follows from the schema.
    """

    before: str
    after: str
    types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Items(Series):
    """Items, each with ``key_open``, its name, and its value with what stands around it; ``sep`` stands between items."""

    key_open: str
    values: tuple[Value, ...]
    sep: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.key_open, *(text for value in self.values for text in (value.before, value.after)))

    @property
    def _frame(self) -> tuple[str, str, str]:
        return "", self.sep, ""

    def text(self, arguments: Mapping[str, Any]) -> str:
        return self.sep.join(self._item(name, value) for name, value in arguments.items())

    def _item(self, name: str, value: Any) -> str:
        is_text = isinstance(value, str)
        around = next((each for each in self.values if not each.types or is_text == ("string" in each.types)), self.values[0])
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        return f"{self.key_open}{name}{around.before}{text}{around.after}".replace(KEY, name)

    def read(self, reading: Reading, schema: Mapping[str, Any], close: str) -> dict[str, Any]:
        arguments = dict[str, Any]()
        while (at := reading.at) >= 0 and reading.consumes(self.key_open):
            name = reading.word(_ITEM_NAME)
            if reading.at == len(reading.text):
                raise Unfinished
            if not name:  # the mark that closes the call begins like one that opens an item
                reading.at = at
                break
            around = next((value for value in self.values if reading.consumes(value.before)), None)
            if around is None:
                raise NoCall
            arguments[name] = _value_of(self._text_of(reading, around, name, close), around, name, schema)
            if self.sep.strip():
                reading.consumes(self.sep)
        return arguments

    def _text_of(self, reading: Reading, around: Value, name: str, close: str) -> str:
        """The text of a value; moves past what stands after it, which an item or the call's end must follow."""
        if around.before.endswith("\n"):
            if reading.at == len(reading.text) and not reading.ended:
                raise Unfinished
            reading.at += reading.text.startswith("\n", reading.at)
        begin = reading.at
        mark = pieces(around.after)[0].replace(KEY, name)
        while (at := reading.text.find(mark, reading.at)) >= 0:
            reading.at = at
            ends = reading.consumes(around.after, name) and (
                reading.sees(self.sep + self.key_open, close) or (reading.ended and not reading.following)
            )
            if ends:
                text = reading.text[begin:at]
                return text.removesuffix("\n") if around.after.startswith("\n") else text
            reading.at = at + len(mark)
        raise Unfinished

    def _item_rules(self, grammar: MarkedText, rule: str, key: str, value: Any, root: Mapping[str, Any]) -> Iterator[str]:
        types = {*types_of(value, root)}
        choices = texts_of(value)
        is_text = not types or "string" in types
        around = _around(self.values, types, is_text)
        before, after = (part.replace(KEY, key) for part in (around.before, around.after))
        yield f"{rule}: {grammar.text(self.key_open)} {in_lark(key)} {grammar.text(before)} {rule}_value"
        if is_text and not choices:
            yield from grammar.text_up_to(f"{rule}_value", after)
            return
        spelled = [in_lark(choice) for choice in choices]
        if not choices:
            definitions = {name: root[name] for name in _DEFINITIONS if name in root}
            yield f"{rule}_json: %json {styled({**value, **definitions}, lenient=True)}"
            # Also as templates write them that print values as they are.
            named = (("boolean", ("True", "False")), ("null", ("None",)))
            spelled = [f"{rule}_json", *(in_lark(word) for kind, words in named if kind in types for word in words)]
        yield f"{rule}_value: ({' | '.join(spelled)}) {grammar.text(after)}"


def _value_of(text: str, around: Value, name: str, schema: Mapping[str, Any]) -> Any:
    """The value ``text``, whose type the marks around it or the schema say."""
    if text.startswith(_CDATA) and text.endswith("]]>"):
        return text[len(_CDATA) : -3]
    if around.types == ("string",):
        return text
    of_marks = around.types and "string" not in around.types
    return parameter_value(text, name, {"properties": {name: {"type": [*around.types]}}} if of_marks else schema)


def _around(values: Sequence[Value], types: set[str], text: bool) -> Value:
    wanted = {"string"} if text else {"integer"} if types <= {"integer", "number"} else types
    return next((value for value in values if not value.types or wanted & {*value.types}), values[0])
