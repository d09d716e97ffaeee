"""Finds tool calls in a model's output as it is generated."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from tide_runtime.text.held_back import held_back

from tide_serve.request.call_formats import FORMS, NoCall, Reading, ToolCall, Unfinished, read_json

_OPENINGS = re.compile("|".join(map(re.escape, FORMS)))
_BARE_KEYS = ("name", "type", "function", "id", "arguments", "parameters")
_BARE = tuple(f'{opening}"{key}":' for opening in ("{", "[{") for key in _BARE_KEYS)  # how a call without tags begins
_BARE_NAME = re.compile(r'[\s\[]*\{\s*"name"\s*:\s*"([^"\\]*)"')
_BARE_LENGTH = 256
_ENDS = re.compile(r"[}\])>\n]")  # what the last token of a call has
_SHORT = 512


class ToolCallParser:
    """Splits one output into text and calls.

    A call has one of the forms of `call_formats`, or is JSON that is the whole output. What is not a call of one of ``tools``
    stays text, as does a call that the end of the output cuts off. Text is not changed; white space alone before, between and
    after calls is dropped.

    Args:
        tools: names, or a mapping of names to the JSON schemas of their parameters.
        hidden: tags that are special tokens, and not for the client where they belong to no call.
        most: calls; what follows them is dropped. None: no limit.
    """

    def __init__(self, tools: Collection[str], hidden: Collection[str] = (), most: int | None = None) -> None:
        self._tools = tools if isinstance(tools, Mapping) else {name: {} for name in tools}
        self._hidden, self._most, self._phrases = hidden, most, (*FORMS, *hidden)
        self._held = ""  # not yet text and not yet a call
        self._bare, self._open = True, False  # nothing came yet; ``held`` begins with what may be a call
        self._space, self._in_text = "", False  # white space that may turn out to stand between calls
        self.calls: list[ToolCall] = []

    def feed(self, text: str, last: bool = False) -> tuple[str, list[ToolCall]]:
        """Add output; returns the text and the calls that are certain now, which are all where ``text`` is the ``last``."""
        self._held += text
        shown, calls = "", list[ToolCall]()
        if not self._open or len(self._held) <= _SHORT or _ENDS.search(text):  # a long call is read when it may be complete
            shown, calls = self._advance(ended=False)
        if last:
            rest, more = self.finish()
            return shown + rest, calls + more
        return shown, calls

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest, at the end of the output."""
        shown, calls = self._advance(ended=True)
        return shown if self.calls else shown + self._space, calls

    def _advance(self, ended: bool) -> tuple[str, list[ToolCall]]:
        shown, found = "", len(self.calls)
        while not self._full and (text := self._step(ended)) is not None:
            shown += self._text(text)
        if self._full:
            self._held = self._space = ""
        return shown, self.calls[found:]

    @property
    def _full(self) -> bool:
        return self._most is not None and len(self.calls) >= self._most

    def _step(self, ended: bool) -> str | None:
        """Remove a text or a call from the beginning of ``_held``; returns the text, and None where nothing is certain yet."""
        if self._bare and _may_be_bare(self._held, self._tools, ended):
            if self._reads(None, ended):
                return ""
            if self._open:
                return None
        self._open = False
        opening = _OPENINGS.search(self._held)
        if opening is None:
            certain = len(self._held) - (0 if ended else held_back(self._held, self._phrases))
            return self._removed(certain) if certain else None
        if opening.start():
            return self._removed(opening.start())
        self._bare = False
        if self._reads(opening[0], ended):
            return ""
        return None if self._open else self._removed(opening.end())

    def _removed(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        self._bare = self._bare and not text.strip()
        return text

    def _reads(self, opening: str | None, ended: bool) -> bool:
        """Whether ``_held`` begins with calls, which are removed then; ``opening`` None: calls are all of it."""
        keeps, read = (True, read_json) if opening is None else FORMS[opening]
        reading = Reading(self._held, 0 if keeps else len(opening or ""), self._tools, ended)
        self._open = False
        try:
            calls = read(reading)
            if opening is None and self._held[reading.at :].strip():
                raise NoCall
            if opening is None and not ended:
                raise Unfinished
        except NoCall:
            self._bare = False
            return False
        except Unfinished:
            self._open = not ended
            self._bare = self._bare and not ended
            return False
        self._held, self._space, self._in_text, self._bare = self._held[reading.at :], "", False, False
        self.calls += calls[: None if self._most is None else self._most - len(self.calls)]
        return True

    def _text(self, text: str) -> str:
        """``text`` as it is shown; white space is held back until other text shows that it is not between calls."""
        for tag in self._hidden:
            text = text.replace(tag, "")
        if not self._in_text:
            text, self._space = self._space + text, ""
            self._in_text = bool(text.strip())
            if not self._in_text:
                text, self._space = "", text
        return text


def split_calls(
    text: str, tools: Collection[str], hidden: Collection[str] = (), most: int | None = None
) -> tuple[str, list[ToolCall]]:
    """The text and the calls of a whole output, as `ToolCallParser` finds them."""
    return ToolCallParser(tools, hidden, most).feed(text, last=True)


def _may_be_bare(text: str, tools: Collection[str], ended: bool) -> bool:
    """Whether ``text`` is, or may become, JSON that begins like a call of one of ``tools``."""
    compact = re.sub(r"\s+", "", text.lstrip()[:_BARE_LENGTH])
    begun = compact.startswith(_BARE) or (not ended and any(begin.startswith(compact) for begin in _BARE))
    name = _BARE_NAME.match(text)
    return begun and (name is None or name[1] in tools)
