"""Integers of a schema are exact, or the schema is refused."""

import json
from typing import Any

import pytest
from tide_runtime.errors import GrammarError
from tide_runtime.text.grammar_limits import check_integers

BIG = 2**53 + 1


@pytest.mark.parametrize(
    "schema",
    [
        {"const": BIG},
        {"enum": ["a", -BIG]},
        {"enum": [{"a": [BIG]}]},
        {"type": "integer", "minimum": BIG},
        {"type": "object", "properties": {"x": {"type": "integer", "exclusiveMaximum": 10**30}}},
        {"anyOf": [{"type": "integer", "maximum": 2**63 - 1}]},
        {"$defs": {"x": {"multipleOf": BIG}}},
        {"properties": {"default": {"const": BIG}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["json_schema", "lark"])
def test_integers_that_would_be_rounded_are_refused(kind: str, schema: dict[str, Any]) -> None:
    """Breaks: an answer has another integer than the schema's constant, or lies outside of its bounds."""
    source = json.dumps(schema) if kind == "json_schema" else f'start: "a" b\nb: %json {json.dumps(schema)}\n'
    with pytest.raises(GrammarError, match="integers beyond 2\\^53 are not kept exactly"):
        check_integers(kind, source)


@pytest.mark.parametrize(
    "schema",
    [
        {"const": 2**53},
        {"type": "integer", "minimum": -(2**53), "maximum": 2**53 - 1},
        {"type": "integer", "default": BIG, "description": str(BIG)},
        {"const": str(BIG)},
        {"maxLength": BIG},
        {"type": "number", "maximum": 1.7976931348623157e308},
    ],
    ids=str,
)
def test_other_numbers_are_taken(schema: dict[str, Any]) -> None:
    """Breaks: schemas that generators write, with limits that lose nothing, are refused."""
    check_integers("json_schema", json.dumps(schema))
    check_integers("regex", "[0-9]{16}9999999999999999999")
