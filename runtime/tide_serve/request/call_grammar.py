"""The grammar of calls in a form: rules of llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tide_runtime.text.grammar import JSON_STYLE

from tide_serve.request.call_formats import COUNT, ID, KEY, NAME, CallForm, Value
from tide_serve.request.call_values import types_of

MAX_CALLS = 8  # most calls of an answer that follows a grammar: a model that does not stop by itself must
_WILD = {ID: "/[a-zA-Z0-9]{9}/", COUNT: "/[0-9]{1,3}/", NAME: r"/[a-zA-Z0-9_-]{1,64}/"}  # nine: what Mistral's templates demand
_PART = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]|[\ue000-\ue003]|[^<\[\ue000-\ue003]+|[<\[]")
# JSON in pieces: a longer string would shut out an answer that begins like a call.
_JSON_PART = re.compile(r'"[^"]*"|["{}\[\]]|[^"{}\[\]]+')
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_PYTHON = {"boolean": '"True" | "False"', "null": '"None"'}  # as templates write them that print values as they are
_DEFINITIONS = ("$defs", "definitions")

_json = partial(json.dumps, ensure_ascii=False)
_quoted = _json  # a literal of Lark is spelled like a string of JSON

Literal = Callable[[str], str | None]  # a mark in Lark where it is a token; "": the end of a text; None: it is text


def parameters_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of the arguments of ``function``, which takes none where it has no ``parameters``."""
    return {"type": "object", **function["parameters"]} if function.get("parameters") else _NO_PARAMETERS


def styled(schema: Mapping[str, Any], separators: tuple[str, str] = (", ", ": "), lenient: bool = False) -> str:
    """``schema`` with JSON on one line, unless a template indents it: without free white space most of a call follows from it."""
    style = {**JSON_STYLE, "item_separator": separators[0], "key_separator": separators[1]}
    if "\n" in separators[0]:  # a template that indents it
        style = {"whitespace_flexible": True}
    return json.dumps({**schema, "x-guidance": {**style, "lenient": lenient}})


@dataclass(frozen=True)
class CallGrammar:
    """Writes the rules for calls of ``functions`` in ``form``. ``token``: of a mark."""

    form: CallForm
    functions: Sequence[Mapping[str, Any]]
    token: Literal

    def rules(self, parallel: bool) -> Iterator[str]:
        """Rules with ``calls``: one or more, and nothing else."""
        form = self.form
        yield f"body: {' | '.join(f'function_{i}' for i in range(len(self.functions)))}"
        for i, function in enumerate(self.functions):
            yield f"function_{i}: {self._function(function, i)}"
            yield from _Values(self, function, f"arguments_{i}").rules()
        yield f"call: {self.text(self._open)} body"
        yield f"calls: {self.text(form.begin + self._open, lead=True)} body {self._more(parallel)} {self.text(form.end)}"

    def _more(self, parallel: bool) -> str:
        """Calls that follow the first."""
        return f"({self.text(self.form.sep)} call){{0,{MAX_CALLS - 1}}}" if parallel and self.form.several else ""

    def free(self, parallel: bool) -> Iterator[str]:
        """Rules with ``start``: any text with calls in it."""
        form = self.form
        if not form.openings:
            yield "start: calls | tail"
            yield "tail: TEXT"
            yield r"TEXT: /([^{](.|\n)*)?/" if form.as_json is not None else r"TEXT: /(.|\n)*/"
            return
        lead = (form.begin + self._open).lstrip()
        mark = next(part for part in _PART.findall(lead))
        mark = mark if self.token(mark) is not None else form.openings[0][0]
        more = self._more(parallel) if form.begin.strip() or form.sep.strip() else ""  # others are found in the text
        yield f"rest: {self.text(lead[len(mark) :])} body {more} {self.text(form.end)}"
        yield "start: (head rest)* tail" if parallel else "start: head rest | tail"
        token = self.token(mark)
        yield f"head: TEXT {token}" if token else f"head[lazy]: TEXT {_quoted(mark)}"
        yield "tail: TEXT"
        yield r"TEXT: /(.|\n)*/"

    @property
    def _open(self) -> str:
        return self.form.open.removesuffix('"') if self.form.as_json is not None else self.form.open

    def _function(self, function: Mapping[str, Any], i: int) -> str:
        name, form = function["name"], self.form
        if form.as_json is None:
            return f"{_quoted(name)} {self.text(form.named)} arguments_{i} {self.text(form.close)}"
        quoted = f"{_quoted(json.dumps(name))} {self.text(form.named.removeprefix(chr(34)))}"
        return f"{quoted} arguments_{i} {self.text(form.close)}"

    def text(self, literal: str, lead: bool = False) -> str:
        """``literal`` in Lark; empty: there is none. ``lead``: white space before it may be left out."""
        space = literal[: len(literal) - len(literal.lstrip())] if lead else ""
        return " ".join([*([f"({_quoted(space)})?"] if space else []), *self._parts(literal[len(space) :])])

    def _parts(self, literal: str) -> Iterator[str]:
        for part in _PART.findall(literal):
            token = self.token(part)
            if part in _WILD:
                yield _WILD[part]
            elif token is not None:
                yield token
            elif self.form.as_json is not None:
                yield from map(_quoted, _JSON_PART.findall(part))
            else:
                yield _quoted(part)


@dataclass(frozen=True)
class _Values:
    """Writes the rules for the arguments of one function; all begin with ``name``."""

    calls: CallGrammar
    function: Mapping[str, Any]
    name: str

    def rules(self) -> Iterator[str]:
        arguments, schema = self.calls.form.arguments, parameters_of(self.function)
        if arguments.kind == "json":
            # Keywords that llguidance lacks are left out of a schema that is not strict: the call still parses.
            yield f"{self.name}: %json {styled(schema, arguments.separators, lenient=not self.function.get('strict'))}"
            return
        properties = schema.get("properties") or {}
        required = [key in (schema.get("required") or ()) for key in properties]
        open_, separator, close = {"python": ("", ", ", ""), "quoted": ("{", ",", "}"), "items": ("", arguments.sep, "")}[
            arguments.kind
        ]
        around = [self.calls.text(text) for text in (open_, close)]
        yield f"{self.name}: {around[0]} {self.name}_head0 {around[1]}"
        for i, needed in enumerate(required):
            # What may come from argument i on: ``head`` where none came before, ``more`` where one did.
            item, more = f"{self.name}_{i}", f"{self.name}_more{i + 1}"
            sep = self.calls.text(separator)
            yield f"{self.name}_head{i}: {item} {more}" + ("" if needed else f" | {self.name}_head{i + 1}")
            yield f"{self.name}_more{i}: {sep} {item} {more}" + ("" if needed else f" | {more}")
        yield f"{self.name}_head{len(required)}: "
        yield f"{self.name}_more{len(required)}: "
        for i, (key, value) in enumerate(properties.items()):
            yield from self._item(f"{self.name}_{i}", key, value, schema)

    def _item(self, rule: str, key: str, value: Any, root: Mapping[str, Any]) -> Iterator[str]:
        """Rules for the argument ``key`` of schema ``value``."""
        types = set(types_of(value, root))
        choices = _texts_of(value) if isinstance(value, Mapping) else []
        if self.calls.form.arguments.kind == "items":
            yield from self._marked(rule, key, value, types, choices, root)
            return
        python = self.calls.form.arguments.kind == "python"
        yield f"{rule}: {_quoted(key + ('=' if python else ':'))} {rule}_value"
        quote = self.calls.text(self.calls.form.arguments.quote)
        spelled = [f"{quote} {_quoted(choice)} {quote}" for choice in choices]
        if python:
            spelled = [_quoted(spell(choice)) for choice in choices for spell in (_json, repr)]
        yield f"{rule}_value: {' | '.join(spelled or sorted(f'any_{kind}' for kind in types) or ['any_value'])}"

    def _marked(
        self, rule: str, key: str, value: Any, types: set[str], choices: list[str], root: Mapping[str, Any]
    ) -> Iterator[str]:
        """Rules for an argument between marks."""
        arguments, is_text = self.calls.form.arguments, not types or "string" in types
        around = _around(arguments.values, types, is_text)
        before, after = (part.replace(KEY, key) for part in (around.before, around.after))
        yield f"{rule}: {self.calls.text(arguments.key_open)} {_quoted(key)} {self.calls.text(before)} {rule}_value"
        if is_text and not choices:
            yield from self._raw(f"{rule}_value", after)
            return
        spelled = [_quoted(choice) for choice in choices]
        if not choices:
            definitions = {name: root[name] for name in _DEFINITIONS if name in root}
            yield f"{rule}_json: %json {styled({**value, **definitions}, lenient=True)}"
            spelled = [f"{rule}_json", *(_PYTHON[kind] for kind in sorted(types & _PYTHON.keys()))]
        yield f"{rule}_value: ({' | '.join(spelled)}) {self.calls.text(after)}"

    def _raw(self, rule: str, after: str) -> Iterator[str]:
        """Any text up to ``after``."""
        mark = _PART.findall(after.lstrip())[0]
        space = after[: len(after) - len(after.lstrip())]
        token = self.calls.token(mark)
        rest = self.calls.text(after[len(space) + len(mark) :])
        yield f"{rule}: {rule}_text {rest}"
        if token is not None:
            yield rf"{rule}_text: /(.|\n)*/ {self.calls.text(space)} {token}"
        else:
            yield rf"{rule}_text[suffix={_quoted(space + mark)}]: /(.|\n)*/"


def any_values(form: CallForm, calls: CallGrammar) -> Iterator[str]:
    """Rules for values of every type, in the spelling of a form that has its own."""
    kind, quote = form.arguments.kind, calls.text(form.arguments.quote)
    if kind not in ("python", "quoted"):
        return
    python = kind == "python"
    comma, colon = (", ", ": ") if python else (",", ":")
    string = '%json {"type": "string"}'
    yield "any_value: any_string | any_number | any_boolean | any_null | any_array | any_object"
    yield from (f'any_{kind}: %json {{"type": "{kind}"}}' for kind in ("number", "integer"))
    yield 'any_boolean: "True" | "False"' if python else 'any_boolean: "true" | "false"'
    yield 'any_null: "None"' if python else 'any_null: "null" | "None"'
    yield f'any_array: "[" (any_value ({_quoted(comma)} any_value)*)? "]"'
    yield f'any_object: "{{" (any_member ({_quoted(comma)} any_member)*)? "}}"'
    yield f"any_member: {'any_string' if python else '/[a-zA-Z0-9_.-]+/'} {_quoted(colon)} any_value"
    if python:
        yield r"any_string: any_json | /'[^'\\\n]*'/"
        yield f"any_json: {string}"
    elif calls.token(form.arguments.quote) is not None:
        yield rf"any_string: {quote} /(.|\n)*/ {quote}"
    else:
        yield f"any_string: {quote} any_text"
        yield rf"any_text[suffix={_quoted(form.arguments.quote)}]: /(.|\n)*/"


def _around(values: Sequence[Value], types: set[str], text: bool) -> Value:
    wanted = {"string"} if text else {"integer"} if types <= {"integer", "number"} else types
    return next((value for value in values if not value.types or wanted & {*value.types}), values[0])


def _texts_of(schema: Mapping[str, Any]) -> list[str]:
    """The strings that are all that ``schema`` allows; none: it allows others."""
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return choices if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices) else []
