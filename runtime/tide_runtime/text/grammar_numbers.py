"""Integers of JSON schemas that llguidance cannot keep: it reads numbers as float64, which has not all integers beyond 2^53.

A bound or a value that it would round is refused, as outputs would follow another schema than the one that was given.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tide_runtime.errors import GrammarError

_MOST = 2**53
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")
_EMBEDDED = re.compile(r"%json\s*(?=\{)")


def check_integers(kind: str, source: str) -> None:
    """Raise GrammarError for a grammar with a JSON schema that has an integer beyond 2^53 as a value or a bound."""
    if not re.search(r"\d{16}", source):  # most have none
        return
    for schema in _schemas(kind, source):
        _check(schema, "")


def _schemas(kind: str, source: str) -> list[Any]:
    """The JSON schemas of a grammar; what cannot be read is llguidance's to refuse."""
    try:
        if kind == "json_schema":
            return [json.loads(source)]
        decoder = json.JSONDecoder()
        return [decoder.raw_decode(source, embedded.end())[0] for embedded in _EMBEDDED.finditer(source)]
    except (ValueError, RecursionError):
        return []


def _check(schema: Any, keyword: str) -> None:
    if isinstance(schema, int) and abs(schema) > _MOST and keyword:
        what = f"{keyword} has {str(schema)[:40]}, and integers beyond 2^53 are not kept exactly"
        raise GrammarError(f"{what}; use smaller ones, or a string")
    for key, value in schema.items() if isinstance(schema, dict) else [(keyword, each) for each in _items(schema)]:
        _check(value, key if key in _NUMERIC else keyword)


def _items(schema: Any) -> list[Any]:
    return schema if isinstance(schema, list) else []
