"""Values of arguments as models write them in the text of a call: JSON, Python, quotes of a model's own, and bare text."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")
_BARE_KEY = re.compile(r"[^\s{}\[\],:]+(?=\s*:)")
_PYTHON_NAME = re.compile(r"\b(?:None|True|False)\b(?!\s*:)")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
_DEPTH = 8  # references and combinations of a schema that are followed
_JSON_NAMES = {"true": True, "false": False, "null": None}  # some templates write them into Python calls


class NoCall(Exception):
    """It is not a call of one of the tools."""


def parsed(text: str) -> Any:
    """The JSON value ``text``. Raises NoCall for what is none."""
    try:
        return json.loads(text, strict=False)  # models write line breaks into strings
    except (ValueError, RecursionError) as error:
        raise NoCall from error


def as_object(arguments: Any) -> dict[str, Any]:
    """The arguments, which may be JSON in a string."""
    if isinstance(arguments, str):
        arguments = parsed(arguments) if arguments.strip() else None
    if arguments is not None and not isinstance(arguments, dict):
        raise NoCall
    return arguments or {}


def python_arguments(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
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


def quoted_object(text: str, quote: str) -> Any:
    """The object ``text``, JSON but for strings between ``quote`` and keys without any. Raises NoCall for what is none."""
    parts = text.split(quote)
    return parsed("".join(json.dumps(part) if i % 2 else _as_json(part) for i, part in enumerate(parts)))


def _as_json(text: str) -> str:
    """Text between the strings of an object with keys that have no quotes."""
    text = _PYTHON_NAME.sub(lambda name: json.dumps(ast.literal_eval(name[0])), text)
    return _BARE_KEY.sub(lambda key: json.dumps(key[0]), text)


def dumped(arguments: dict[str, Any]) -> str:
    """``arguments`` as JSON. Numbers that JSON has not, NaN and infinities, are null, as JavaScript writes them."""
    try:
        text = json.dumps(arguments, ensure_ascii=False)
        if "NaN" in text or "Infinity" in text:
            text = json.dumps(json.loads(text, parse_constant=lambda name: None), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise NoCall from error
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


def parameter_value(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    """The value of parameter ``name`` in ``schema``; ``text`` itself where it is a string there, or has none of its types."""
    properties = schema.get("properties")
    parameter = properties.get(name) if isinstance(properties, Mapping) else None
    types = set(types_of(parameter, schema))
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


def types_of(schema: Any, root: Mapping[str, Any], depth: int = _DEPTH) -> Iterator[str]:
    """Names of the types that ``schema`` allows."""
    if not isinstance(schema, Mapping) or depth == 0:
        return
    kind = schema.get("type")
    yield from (name for name in ("string", *_TYPES) if name == kind or (isinstance(kind, list) and name in kind))
    if kind is None:
        values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
        yield from (name for value in values for name in _TYPES if _is(value, name))
    for part in (part for key in ("anyOf", "oneOf", "allOf") for part in _list(schema.get(key))):
        yield from types_of(part, root, depth - 1)
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        yield from types_of(target, root, depth - 1)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
