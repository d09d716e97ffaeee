"""JSON schemas whose grammar would lead to a place where no text can follow, or from where none ever ends.

llguidance refuses most schemas that nothing fulfils. Two kinds it compiles: patterns of names that match named properties only,
so that nothing can follow the comma behind the last of them; and references that each need another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tide_runtime.errors import GrammarError

Follows = Callable[[dict[str, Any], str], bool]  # whether any text follows a text under a schema

_NULL = {"type": "null"}


def without_dead_ends(schema: Any, follows: Follows) -> Any:
    """The same language as ``schema`` without patterns that match no further name. Raises GrammarError where it never ends."""
    _check_references(schema)
    return _reduced(schema, follows)


def _reduced(schema: Any, follows: Follows) -> Any:
    if isinstance(schema, list):
        return [_reduced(part, follows) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    reduced = {key: _reduced(value, follows) for key, value in schema.items()}
    names, patterns = reduced.get("properties"), reduced.get("patternProperties")
    if (
        names
        and patterns
        and isinstance(names, dict)
        and isinstance(patterns, dict)
        and reduced.get("additionalProperties") is False
    ):
        probe = {
            "type": "object",
            "properties": {name: _NULL for name in names},
            "required": [*names],
            "patternProperties": {pattern: _NULL for pattern in patterns},
            "additionalProperties": False,
        }
        if not follows(probe, "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: null" for name in names) + ", "):
            del reduced["patternProperties"]
    return reduced


def _check_references(schema: Any) -> None:
    """Raise GrammarError for a reference that can never end."""
    open_ = {reference: _target(schema, reference) for reference in _references(schema)}
    ending: set[str] = set()
    while found := {reference for reference, target in open_.items() if _ends(target, ending)} - ending:
        ending |= found
    if endless := sorted(open_.keys() - ending):
        raise GrammarError(f"the JSON schema never ends: each {endless[0]!r} needs another one; make it optional, or allow null")


def _ends(schema: Any, ending: set[str]) -> bool:
    """Whether text under ``schema`` can end, where that under the references ``ending`` can."""
    if not isinstance(schema, Mapping):
        return True
    properties, items = schema.get("properties"), schema.get("items")
    needed = [properties[name] for name in schema.get("required") or () if isinstance(properties, Mapping) and name in properties]
    needed += [items] if isinstance(items, Mapping) and isinstance(schema.get("minItems"), int) and schema["minItems"] > 0 else []
    needed += schema["allOf"] if isinstance(schema.get("allOf"), list) else []
    choices = [part for part in (schema.get("anyOf"), schema.get("oneOf")) if isinstance(part, list)]
    reference = schema.get("$ref")
    return (
        (not isinstance(reference, str) or not reference.startswith("#") or reference in ending)
        and all(_ends(part, ending) for part in needed)
        and all(any(_ends(part, ending) for part in parts) for parts in choices)
    )


def _references(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return {reference for part in schema for reference in _references(part)}
    if not isinstance(schema, Mapping):
        return set()
    reference = schema.get("$ref")
    own = {reference} if isinstance(reference, str) and reference.startswith("#") else set()
    return own.union(*map(_references, schema.values()))


def _target(schema: Any, reference: str) -> Any:
    """What ``reference`` stands for; None where that is not in ``schema``, which llguidance refuses."""
    for step in reference[1:].lstrip("/").split("/") if len(reference) > 1 else ():
        schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return schema
