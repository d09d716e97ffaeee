"""``response_format``: the grammar that an answer follows.

Besides OpenAI's ``text``, ``json_object`` and ``json_schema`` (enforced whether ``strict`` or not) there are the extensions
``{"type": "regex", "pattern": …}`` and ``{"type": "lark", "grammar": …}``, in the syntax of `tide_runtime.Grammar`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from tide_runtime import Engine, Grammar
from tide_runtime.errors import GrammarError

from tide_serve.config import ServeConfig
from tide_serve.errors import ApiError
from tide_serve.request.body import is_deeper

_FIELD = "response_format"


async def response_grammar(engine: Engine, response_format: Mapping[str, Any], config: ServeConfig) -> Grammar | None:
    """The grammar of ``response_format``; None: any text.

    Raises ApiError beyond the limits of ``config``, and for a grammar that cannot be compiled.
    """
    if response_format["type"] == "text":
        return None
    grammar = _grammar(response_format, config)
    await check_grammar(engine, grammar, _FIELD)
    return grammar


def _grammar(response_format: Mapping[str, Any], config: ServeConfig) -> Grammar:
    kind = response_format["type"]
    if kind in ("json_object", "json_schema"):
        schema = response_format.get("json_schema", response_format).get("schema")
        if schema is None:
            return Grammar.json_object()
        check_schema(schema, _FIELD, config)
        return Grammar.json_schema(schema)
    source = response_format["pattern" if kind == "regex" else "grammar"]
    _check_size(source, _FIELD, config)
    return Grammar.regex(source) if kind == "regex" else Grammar.lark(source)


async def check_grammar(engine: Engine, grammar: Grammar, param: str) -> None:
    """Raise ApiError with the reason where ``grammar`` cannot be compiled. The engine keeps what it has compiled."""
    try:
        await asyncio.to_thread(engine.check_grammar, grammar)  # a short grammar may take long
    except GrammarError as error:
        logged = f"{param} cannot be compiled"
        raise ApiError(400, f"{param}: {error}", param, "invalid_grammar", logged=logged) from error


def check_schema(schema: Mapping[str, Any], param: str, config: ServeConfig) -> None:
    """Raise ApiError for a JSON schema that is larger or nested more deeply than ``config`` allows."""
    if is_deeper(schema, config.max_schema_depth):
        raise ApiError(400, f"{param} has more than {config.max_schema_depth} levels; send a flatter schema", param)
    _check_size(json.dumps(schema), param, config)


def _check_size(source: str, param: str, config: ServeConfig) -> None:
    """Raise ApiError for the text of a grammar or schema that is longer than ``config`` allows."""
    if (size := len(source.encode())) > config.max_schema_bytes:
        raise ApiError(400, f"{param} has {size} bytes; send at most {config.max_schema_bytes}", param)
