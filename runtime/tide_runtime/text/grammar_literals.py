"""Literals of grammars that spell an added token, such as the text ``"<tool_call>"`` for a model with a token of that name.

To llguidance, tokens like ``<tool_call>`` are no text: a grammar in Lark names them, without quotes, and literals are spelled
with other tokens. But where a literal leaves no choice, llguidance takes its tokens from the tokenizer, which gives the added
token, and then refuses it. Grammars with such literals are compiled without forced tokens, so that their masks allow any
spelling. It costs them the free drafts of policy ``exact``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

_NO_FORCING = '%llguidance {"no_forcing": true}\n'
_LARK_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')  # strings, also those of JSON schemas, and patterns


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
