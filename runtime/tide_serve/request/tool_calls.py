"""Finds tool calls in a model's output as it is generated."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

from tide_runtime.text.prefix_match import partial_match_length

from tide_serve.request.call_formats import BARE, PUBLISHED, CallForm, ToolCall
from tide_serve.request.call_reader import NoCall, Reading, Unfinished

_BARE_KEYS = ("name", "type", "function", "id", "arguments", "parameters")
_BARE = tuple(f'{opening}"{key}":' for opening in ("{", "[{") for key in _BARE_KEYS)  # how a call without tags begins
_BARE_NAME = re.compile(r'[\s\[]*\{\s*"name"\s*:\s*"([^"\\]*)"')
_BARE_LENGTH = 256
_ENDS = re.compile(r"[}\])>\n]")  # a call's last token contains one of these characters
_SHORT = 512
Read = Callable[[Reading], list[ToolCall]]


class ToolCallParser:
    """Splits one output into text and calls.

    A call has one of ``forms``; those that begin with no mark, and JSON, are the whole output. What is not a call of one of
    ``tools`` stays text, as does a call that the end of the output cuts off. Text is not changed; white space alone before,
    between and after calls is dropped.

    Args:
        tools: names, or a mapping of names to the JSON schemas of their parameters.
        hidden: tags that are special tokens, and not for the client where they belong to no call.
        max_calls: calls; what follows them is dropped. None: no limit.
        forms: in the order in which they are tried.
    """

    def __init__(
        self,
        tools: Collection[str],
        hidden: Collection[str] = (),
        max_calls: int | None = None,
        forms: Sequence[CallForm] = PUBLISHED,
    ) -> None:
        self._tools = tools if isinstance(tools, Mapping) else {name: {} for name in tools}
        self._hidden, self._max_calls = hidden, max_calls
        self._starts = [(form, phrase, lead) for form in forms for phrase, lead in form.openings]
        phrases = {phrase for _, phrase, _ in self._starts}
        self._openings = re.compile("|".join(map(re.escape, phrases)) or "(?!)")
        self._phrases = phrases.union(hidden)
        self._bare_forms = [*BARE, *(form for form in forms if not form.openings and form not in BARE)]
        self._pending = ""  # not yet text and not yet a call
        self._bare, self._open = True, False  # nothing came yet; ``held`` begins with what may be a call
        self._behind: CallForm | None = None  # form of the call that ended last, with nothing but white space since
        self._space, self._in_text = "", False  # white space that may turn out to stand between calls
        self.calls: list[ToolCall] = []

    def feed(self, text: str, last: bool = False) -> tuple[str, list[ToolCall]]:
        """Add output; returns the text and the calls that are certain now, which are all where ``text`` is the ``last``."""
        self._pending += text
        shown = ""
        calls = list[ToolCall]()
        if not self._open or len(self._pending) <= _SHORT or _ENDS.search(text):  # a long call is read when it may be complete
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
        shown = ""
        found = len(self.calls)
        while not self._full and (text := self._step(ended)) is not None:
            shown += self._text(text)
        if self._full:
            self._pending = self._space = ""
        return shown, self.calls[found:]

    @property
    def _full(self) -> bool:
        return self._max_calls is not None and len(self.calls) >= self._max_calls

    def _step(self, ended: bool) -> str | None:
        """Remove a text or a call from the beginning of ``_pending``; returns the text, and None where nothing is certain yet."""
        if self._takes(self._without_opening(ended), ended):
            return ""
        if self._open:
            return None
        self._bare, opening = False, self._openings.search(self._pending)
        if opening is None:
            certain = len(self._pending) - (0 if ended else partial_match_length(self._pending, self._phrases))
            return self._removed(certain) if certain else None
        if opening.start():
            return self._removed(opening.start())
        if self._takes(((form, partial(_read_opening, form, phrase, lead)) for form, phrase, lead in self._starts), ended):
            return ""
        return None if self._open else self._removed(opening.end())

    def _removed(self, length: int) -> str:
        text, self._pending = self._pending[:length], self._pending[length:]
        if text.strip():
            self._behind = None
        return text

    def _without_opening(self, ended: bool) -> Iterator[tuple[CallForm, Read]]:
        """What may be next where no mark opens a call: what belongs to the one before it, another, or calls and nothing else."""
        form = self._behind
        if form is not None and self._pending.strip():
            yield form, partial(_read_ending, form)
            if form.several and form.as_json is None and not form.call_open.strip():
                yield form, form.read
        for form in self._bare_forms if self._bare else ():
            if form.as_json is None or form.lead or _may_be_bare(self._pending, self._tools, ended):
                yield form, partial(_read_all, form)

    def _takes(self, reads: Iterable[tuple[CallForm, Read]], ended: bool) -> bool:
        """Whether one of ``reads`` finds calls, or what belongs to them, where ``_pending`` begins; then they are removed."""
        self._open = False
        for form, read in reads:
            reading = Reading(self._pending, self._tools, ended)
            try:
                calls = read(reading)
            except NoCall:
                continue
            except Unfinished:
                self._open = not ended
                if self._open:
                    return False
                continue
            self._behind = form
            self._pending = self._pending[reading.at :]
            self._bare = False
            self._in_text = False
            self._space = ""
            self.calls += calls[: None if self._max_calls is None else self._max_calls - len(self.calls)]
            return True
        return False

    def _text(self, text: str) -> str:
        """``text`` as it is shown; white space is held back until other text shows that it is not between calls."""
        for tag in self._hidden:
            text = text.replace(tag, "")
        if not self._in_text:
            text = self._space + text
            self._space = ""
            self._in_text = bool(text.strip())
            if not self._in_text:
                text, self._space = "", text
        return text


def split_calls(
    text: str,
    tools: Collection[str],
    hidden: Collection[str] = (),
    max_calls: int | None = None,
    forms: Sequence[CallForm] = PUBLISHED,
) -> tuple[str, list[ToolCall]]:
    """The text and the calls of a whole output, as `ToolCallParser` finds them."""
    return ToolCallParser(tools, hidden, max_calls, forms).feed(text, last=True)


def _read_opening(form: CallForm, phrase: str, lead: str, reading: Reading) -> list[ToolCall]:
    """The calls behind ``lead``, which begins with ``phrase``."""
    if not reading.text.startswith(phrase) and not reading.ended and phrase.startswith(reading.text):
        raise Unfinished
    if not reading.text.startswith(phrase) or not reading.consumes(lead):
        raise NoCall
    return form.read(reading)


def _read_ending(form: CallForm, reading: Reading) -> list[ToolCall]:
    """No call, but a piece of what stands behind one."""
    if not any(reading.closes(piece) for piece in form.behind):
        raise NoCall
    return []


def _read_all(form: CallForm, reading: Reading) -> list[ToolCall]:
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
