"""Values of arguments: their types after a schema, and their JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tide_serve.request.call_reader import NoCall, parsed

_SURROGATE = re.compile("[\ud800-\udfff]")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
_DEPTH = 8  # references and combinations of a schema that are followed


def as_object(arguments: Any) -> dict[str, Any]:
    """The arguments, which may be JSON in a string."""
    if isinstance(arguments, str):
        arguments = parsed(arguments) if arguments.strip() else None
    if arguments is not None and not isinstance(arguments, dict):
        raise NoCall
    return arguments or {}


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


def texts_of(schema: Any) -> list[str]:
    """The strings that are all that ``schema`` allows; none: it allows others."""
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None) if isinstance(schema, Mapping) else None
    return choices if isinstance(choices, list) and all(isinstance(choice, str) for choice in choices) else []
