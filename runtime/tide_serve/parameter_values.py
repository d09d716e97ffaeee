"""Values of a call's parameters that a model writes as bare text, read as the tool's JSON schema has them."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
_DEPTH = 8  # of references and combinations that are followed


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
