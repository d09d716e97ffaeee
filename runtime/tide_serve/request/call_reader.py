"""A position in a model's output, from which the parts of a call are read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

Tools = Mapping[str, Mapping[str, Any]]  # name → JSON schema of the parameters; empty: not known
# In a literal: an id, a number that counts calls, the name of the call's tool once more, the name of the item once more.
ID = "\ue000"
COUNT = "\ue001"
NAME = "\ue002"
KEY = "\ue003"
_PIECE = re.compile(r"<[^<>\s\ue000-\ue002]*>?|\[[A-Z_/]+\]|[\ue000-\ue003]|[^\s<\[\ue000-\ue003]+|\[")
_SPACE = re.compile(r"\s*")
_TOOL = re.compile(r"[\w-]*")
_WILD = {ID: re.compile(r"[\w:.-]*"), COUNT: re.compile(r"\d*"), NAME: _TOOL}
_JSON_PARTS = re.compile(r'"(?:[^"\\]++|\\.)*+"|["{}\[\]]', re.DOTALL)
_PYTHON_PARTS = re.compile(_JSON_PARTS.pattern + r"""|'(?:[^'\\]++|\\.)*+'|['()]""", re.DOTALL)
_DEPTHS = {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}


class NoCall(Exception):
    """It is not a call of one of the tools."""


class Unfinished(Exception):
    """More text may make it a call."""


@lru_cache(1024)
def pieces(literal: str) -> list[str]:
    """Parts of ``literal`` between which white space is free."""
    return _PIECE.findall(literal)


def parsed(text: str) -> Any:
    """The JSON value ``text``. Raises NoCall for what is none."""
    try:
        return json.loads(text, strict=False)  # models write line breaks into strings
    except (ValueError, RecursionError) as error:
        raise NoCall from error


class Reading:
    """A position in a text. Its methods raise `Unfinished` where more text decides, and `NoCall`.

    Args:
        ended: no more text will come. A closing tag that a model leaves out there, or a limit of tokens cuts off, is not missed.
    """

    def __init__(self, text: str, tools: Tools, ended: bool, at: int = 0) -> None:
        self.text = text
        self.tools = tools
        self.ended = ended
        self.at = at

    def consumes(self, literal: str, key: str = "") -> bool:
        """Move past white space and ``literal``, if they are next. ``key``: the item's name."""
        begin = self.at
        for piece in pieces(literal):
            piece = piece.replace(KEY, key)
            at = self._after_space
            if piece in _WILD:
                self.at = at
                self.word(_WILD[piece])
            elif self.text.startswith(piece, at):
                self.at = at + len(piece)
            else:
                self.at = begin
                if not self.ended and piece.startswith(self.text[at : at + len(piece)]):
                    raise Unfinished
                return False
        return True

    def sees(self, *literals: str) -> bool:
        """Whether one of ``literals`` is next."""
        begin = self.at
        seen = any(literal.strip() and self.consumes(literal) for literal in literals)
        self.at = begin
        return seen

    def closes(self, literal: str) -> bool:
        """`consumes`, and at the end of the text a part of ``literal`` will do."""
        if self.consumes(literal):
            return True
        rest = self.text[self._after_space :]
        cut_off = self.ended and "".join(pieces(literal)).startswith("".join(rest.split()))
        self.at = len(self.text) if cut_off else self.at
        return cut_off

    def word(self, pattern: re.Pattern[str]) -> str:
        """The next word."""
        begin = self._after_space
        self.at = pattern.match(self.text, begin).end()  # type: ignore[union-attr]
        return self.text[begin : self.at]

    def tool(self) -> str:
        """The name of a tool."""
        name = self.word(_TOOL)
        if self.at == len(self.text) and not self.ended and any(tool.startswith(name) for tool in self.tools):
            raise Unfinished
        if name not in self.tools:
            raise NoCall
        return name

    @property
    def following(self) -> str:
        """The next character after white space; empty at the end of the text."""
        return self.text[self._after_space :][:1]

    @property
    def _after_space(self) -> int:
        return _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]

    def json(self) -> Any:
        """The JSON object or list that is next."""
        return parsed(self.enclosed("{["))

    def enclosed(self, openings: str, quote: str = "") -> str:
        """The text that is next from a bracket of ``openings`` to the one that closes it. ``quote``: around strings."""
        if not (bracket := self.following):
            raise Unfinished
        if bracket not in openings:
            raise NoCall
        begin = self.at = self._after_space
        strings = re.compile(f"{re.escape(quote)}.*?{re.escape(quote)}|[{{}}\\[\\]]", re.DOTALL) if quote else _JSON_PARTS
        self.at = self._closing(strings, 0)
        return self.text[begin : self.at]

    def python(self) -> str:
        """The text up to the parenthesis that closes."""
        begin = self.at
        self.at = self._closing(_PYTHON_PARTS, 1) - 1
        return self.text[begin : self.at]

    def _closing(self, parts: re.Pattern[str], depth: int) -> int:
        """Place after the bracket that closes ``depth`` open ones; 0: the next one and its pair. Raises Unfinished."""
        for part in parts.finditer(self.text, self.at):
            if part[0] in ('"', "'"):  # of a string that goes on
                break
            depth += _DEPTHS.get(part[0], 0)
            if depth == 0:
                return part.end()
        raise Unfinished
