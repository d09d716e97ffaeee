"""The grammar of calls in a form: rules of llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tide_serve.request.call_arguments import in_lark
from tide_serve.request.call_formats import CallForm
from tide_serve.request.call_reader import COUNT, ID, NAME

MAX_CALLS = 8  # calls of an answer that follows a grammar, as some models do not stop by themselves
_WILD = {ID: "/[a-zA-Z0-9]{9}/", COUNT: "/[0-9]{1,3}/", NAME: r"/[a-zA-Z0-9_-]{1,64}/"}  # nine: what Mistral's templates demand
_PART = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]|[\ue000-\ue003]|[^<\[\ue000-\ue003]+|[<\[]")
# JSON in pieces: a longer string would shut out an answer that begins like a call.
_JSON_PART = re.compile(r'"[^"]*"|["{}\[\]]|[^"{}\[\]]+')
_ANY_TEXT = r"/(.|\n)*/"


@dataclass(frozen=True)
class CallGrammar:
    """Writes the rules for calls of ``functions`` in ``form``.

    Args:
        token: a mark in Lark where it is a token; "": the end of a text; None: it is text.
    """

    form: CallForm
    functions: Sequence[Mapping[str, Any]]
    token: Callable[[str], str | None]

    def rules(self, parallel: bool) -> Iterator[str]:
        """Rules with ``calls``: one or more, and nothing else."""
        form = self.form
        yield f"body: {' | '.join(f'function_{i}' for i in range(len(self.functions)))}"
        for i, function in enumerate(self.functions):
            yield f"function_{i}: {self._named(function['name'])} arguments_{i} {self.text(form.close)}"
            yield from form.arguments.rules(self, function, f"arguments_{i}")
        yield from form.arguments.shared_rules(self)
        lead = form.begin + self._open
        space = lead[: len(lead) - len(lead.lstrip())]  # may be left out
        begin = f"({in_lark(space)})? " if space else ""
        yield f"call: {self.text(self._open)} body"
        yield f"calls: {begin}{self.text(lead[len(space) :])} body {self._more(parallel)} {self.text(form.end)}"

    def free(self, parallel: bool) -> Iterator[str]:
        """Rules with ``start``: any text with calls in it."""
        form = self.form
        yield "tail: TEXT"
        if not form.openings:
            yield "start: calls | tail"
            yield r"TEXT: /([^{](.|\n)*)?/" if form.as_json is not None else f"TEXT: {_ANY_TEXT}"
            return
        lead = (form.begin + self._open).lstrip()
        mark = next(part for part in _PART.findall(lead))
        token = self.token(mark)
        mark = mark if token is not None else form.openings[0][0]
        more = self._more(parallel) if form.begin.strip() or form.sep.strip() else ""  # others are found in the text
        yield f"rest: {self.text(lead[len(mark) :])} body {more} {self.text(form.end)}"
        yield "start: (head rest)* tail" if parallel else "start: head rest | tail"
        yield f"head: TEXT {token}" if token else f"head[lazy]: TEXT {in_lark(mark)}"
        yield f"TEXT: {_ANY_TEXT}"

    def _more(self, parallel: bool) -> str:
        """Calls that follow the first."""
        return f"({self.text(self.form.sep)} call){{0,{MAX_CALLS - 1}}}" if parallel and self.form.several else ""

    @property
    def _open(self) -> str:
        return self.form.open.removesuffix('"') if self.form.as_json is not None else self.form.open

    def _named(self, name: str) -> str:
        if self.form.as_json is None:
            return f"{in_lark(name)} {self.text(self.form.named)}"
        return f"{in_lark(json.dumps(name))} {self.text(self.form.named.removeprefix(chr(34)))}"

    def text(self, literal: str) -> str:
        """``literal`` in Lark; empty: there is none."""
        return " ".join(self._parts(literal))

    def _parts(self, literal: str) -> Iterator[str]:
        for part in _PART.findall(literal):
            token = self.token(part)
            if part in _WILD:
                yield _WILD[part]
            elif token is not None:
                yield token
            elif self.form.as_json is not None:
                yield from map(in_lark, _JSON_PART.findall(part))
            else:
                yield in_lark(part)

    def text_up_to(self, rule: str, literal: str) -> Iterator[str]:
        """The rule ``rule`` for any text up to ``literal``, which is a part of it."""
        space = literal[: len(literal) - len(literal.lstrip())]
        mark = _PART.findall(literal.lstrip())[0]
        token = self.token(mark)
        rest = self.text(literal[len(space) + len(mark) :])
        if token is not None:
            yield f"{rule}: {_ANY_TEXT} {self.text(space)} {token} {rest}"
        else:
            yield f"{rule}: {rule}_text {rest}"
            yield f"{rule}_text[suffix={in_lark(space + mark)}]: {_ANY_TEXT}"
