"""What llguidance cannot do with a grammar: literals that spell an added token, and integers that float64 does not have.

To llguidance, added tokens like ``<tool_call>`` are no text: a grammar in Lark names them, without quotes, and literals are
spelled with other tokens. But where a literal leaves no choice, llguidance takes its tokens from the tokenizer, which gives the
added token, and then refuses it. Grammars with such literals are compiled without forced tokens, so that their masks allow any
spelling. It costs them the free drafts of policy ``exact``.

llguidance reads numbers as float64, which has not all integers beyond 2^53. A bound or a value of a JSON schema that it would
round is refused, as outputs would follow another schema than the one that was given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from tide_runtime.errors import GrammarError

_NO_FORCING = '%llguidance {"no_forcing": true}\n'
_LARK_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')  # strings, also those of JSON schemas, and patterns
_MOST = 2**53
_NUMERIC = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")
_EMBEDDED = re.compile(r"%json\s*(?=\{)")


def named_tokens(tokenizer: dict[str, Any]) -> frozenset[str]:
    """Added tokens of a tokenizer.json that are no text to llguidance: special ones, and those in angle brackets."""
    added = [(token["content"], token["special"]) for token in tokenizer.get("added_tokens", [])]
    return frozenset(content for content, special in added if special or (content.startswith("<") and content.endswith(">")))


def spells_one(kind: str, source: str, tokens: Collection[str]) -> bool:
    """Whether a grammar has text that spells one of ``tokens``, as a whole and in the usual escapes."""
    literals = "\n".join(_LARK_LITERAL.findall(source)) if kind == "lark" else source
    return any(spelling in literals for token in tokens for spelling in _spellings(token))


def without_forcing(compiled: str) -> str:
    """The same language as llguidance's grammar ``compiled`` (Lark, or JSON with one grammar), without forced tokens."""
    if not compiled.startswith("{"):
        return _NO_FORCING + compiled
    [grammar] = json.loads(compiled)["grammars"]
    return json.dumps({"grammars": [{"lark_grammar": f"{_NO_FORCING}start: @text"}, {**grammar, "name": "text"}]})


def _spellings(token: str) -> Iterator[str]:
    yield token
    yield json.dumps(token)[1:-1]
    yield re.escape(token)


def check_integers(kind: str, source: str) -> None:
    """Raise GrammarError for a grammar with a JSON schema that has an integer beyond 2^53 as a value or a bound."""
    if not re.search(r"\d{16}", source):  # most have none
        return
    for schema, _, _ in _places(kind, source):
        _check(schema, "")


def _places(kind: str, source: str) -> Iterator[tuple[Any, int, int]]:
    """Each JSON schema of a grammar, and where it begins and ends."""
    starts = {"json_schema": [len(source) - len(source.lstrip())], "lark": [at.end() for at in _EMBEDDED.finditer(source)]}
    for start in starts.get(kind, []):
        try:
            schema, end = json.JSONDecoder().raw_decode(source, start)
        except (ValueError, RecursionError):
            return
        yield schema, start, end


def with_schemas(kind: str, source: str, change: Callable[[Any], Any]) -> str:
    """``source`` with the JSON schemas that ``change`` makes of its own; what cannot be read is llguidance's to refuse."""
    if "patternProperties" not in source and "$ref" not in source:  # most have nothing to change
        return source
    changed = ""
    begin = 0
    for schema, start, end in _places(kind, source):
        changed = changed + source[begin:start] + json.dumps(change(schema))
        begin = end
    return changed + source[begin:]


def _check(schema: Any, keyword: str) -> None:
    if isinstance(schema, int) and abs(schema) > _MOST and keyword:
        what = f"{keyword} has {str(schema)[:40]}, and integers beyond 2^53 are not kept exactly"
        raise GrammarError(f"{what}; use smaller ones, or a string")
    for key, value in schema.items() if isinstance(schema, dict) else [(keyword, each) for each in _items(schema)]:
        _check(value, key if key in _NUMERIC else keyword)


def _items(schema: Any) -> list[Any]:
    return schema if isinstance(schema, list) else []
