"""Finds tool calls in a model's output as it is generated."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from tide_runtime.text.held_back import held_back

from tide_serve.request.call_formats import BARE, PUBLISHED, CallForm, ToolCall
from tide_serve.request.call_reader import NoCall, Reading, Unfinished

_BARE_KEYS = ("name", "type", "function", "id", "arguments", "parameters")
_BARE = tuple(f'{opening}"{key}":' for opening in ("{", "[{") for key in _BARE_KEYS)  # how a call without tags begins
_BARE_NAME = re.compile(r'[\s\[]*\{\s*"name"\s*:\s*"([^"\\]*)"')
_BARE_LENGTH = 256
_ENDS = re.compile(r"[}\])>\n]")  # what the last token of a call has
_SHORT = 512


class ToolCallParser:
    """Splits one output into text and calls.

    A call has one of ``forms``; those that begin with no mark, and JSON, are the whole output. What is not a call of one of
    ``tools`` stays text, as does a call that the end of the output cuts off. Text is not changed; white space alone before,
    between and after calls is dropped.

    Args:
        tools: names, or a mapping of names to the JSON schemas of their parameters.
        hidden: tags that are special tokens, and not for the client where they belong to no call.
        most: calls; what follows them is dropped. None: no limit.
        forms: in the order in which they are tried.
    """

    def __init__(
        self,
        tools: Collection[str],
        hidden: Collection[str] = (),
        most: int | None = None,
        forms: Sequence[CallForm] = PUBLISHED,
    ) -> None:
        self._tools = tools if isinstance(tools, Mapping) else {name: {} for name in tools}
        self._hidden, self._most = hidden, most
        self._starts = [(phrase, lead, form) for form in forms for phrase, lead in form.openings]
        phrases = {phrase for phrase, _, _ in self._starts}
        self._openings = re.compile("|".join(map(re.escape, phrases)) or "(?!)")
        self._phrases = phrases.union(hidden)
        self._bare_forms = [*BARE, *(form for form in forms if not form.openings and form not in BARE)]
        self._held = ""  # not yet text and not yet a call
        self._bare, self._open = True, False  # nothing came yet; ``held`` begins with what may be a call
        self._behind: CallForm | None = None  # form of the call that ended last, with nothing but white space since
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
        for reads in (self._reads_behind, self._reads_bare):
            self._open = False
            if reads(ended):
                return ""
            if self._open:
                return None
        opening = self._openings.search(self._held)
        if opening is None:
            certain = len(self._held) - (0 if ended else held_back(self._held, self._phrases))
            return self._removed(certain) if certain else None
        if opening.start():
            return self._removed(opening.start())
        self._bare = False
        if self._reads_opened(ended):
            return ""
        return None if self._open else self._removed(opening.end())

    def _removed(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        if text.strip():
            self._bare, self._behind = False, None
        return text

    def _reads_behind(self, ended: bool) -> bool:
        """Whether ``_held`` begins with what belongs to the call before it, or with a call that needs no opening."""
        form = self._behind
        if form is None or not self._held.strip():
            return False
        reading = Reading(self._held, self._tools, ended)
        try:
            if any(reading.closes(piece) for piece in form.behind):
                self._take([], reading.at)
                return True
            if form.several and form.as_json is None and not form.call_open.strip():
                self._take(form.read(reading), reading.at)
                return True
        except NoCall:
            pass
        except Unfinished:
            self._open = not ended
        return False

    def _reads_bare(self, ended: bool) -> bool:
        """Whether all of ``_held`` is calls without an opening mark."""
        for form in self._bare_forms if self._bare else ():
            if form.as_json is not None and not form.lead and not _may_be_bare(self._held, self._tools, ended):
                continue
            reading = Reading(self._held, self._tools, ended)
            try:
                self._take(_all_calls(form, reading), reading.at)
                return True
            except NoCall:
                continue
            except Unfinished:
                if not ended:
                    self._open = True
                    return False
        self._bare = False
        return False

    def _reads_opened(self, ended: bool) -> bool:
        """Whether ``_held``, which begins with an opening mark, begins with calls."""
        for phrase, lead, form in self._starts:
            if not self._held.startswith(phrase):
                if not ended and phrase.startswith(self._held):
                    self._open = True
                    return False
                continue
            reading = Reading(self._held, self._tools, ended)
            try:
                if not reading.consumes(lead):
                    continue
                calls = form.read(reading)
            except NoCall:
                continue
            except Unfinished:
                if ended:
                    continue
                self._open = True
                return False
            self._behind = form
            self._take(calls, reading.at)
            return True
        return False

    def _take(self, calls: list[ToolCall], length: int) -> None:
        """Remove ``calls``, or what belongs to them, from the beginning of ``_held``."""
        self._held, self._space, self._in_text, self._bare = self._held[length:], "", False, False
        self.calls += calls[: None if self._most is None else self._most - len(self.calls)]

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
    text: str,
    tools: Collection[str],
    hidden: Collection[str] = (),
    most: int | None = None,
    forms: Sequence[CallForm] = PUBLISHED,
) -> tuple[str, list[ToolCall]]:
    """The text and the calls of a whole output, as `ToolCallParser` finds them."""
    return ToolCallParser(tools, hidden, most, forms).feed(text, last=True)


def _all_calls(form: CallForm, reading: Reading) -> list[ToolCall]:
    """The calls that all of a text is. Raises NoCall where it is something else."""
    if not reading.consumes(form.lead):
        raise NoCall
    calls = list[ToolCall]()
    while not calls or (form.several and form.as_json is None and reading.following):
        calls += form.read(reading)
        while any(reading.consumes(piece) for piece in form.behind):
            pass
    if reading.following:
        raise NoCall
    if not reading.ended:
        raise Unfinished
    return calls


def _may_be_bare(text: str, tools: Collection[str], ended: bool) -> bool:
    """Whether ``text`` is, or may become, JSON that begins like a call of one of ``tools``."""
    compact = re.sub(r"\s+", "", text.lstrip()[:_BARE_LENGTH])
    begun = compact.startswith(_BARE) or (not ended and any(begin.startswith(compact) for begin in _BARE))
    name = _BARE_NAME.match(text)
    return begun and (name is None or name[1] in tools)
