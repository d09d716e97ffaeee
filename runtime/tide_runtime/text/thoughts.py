"""Thoughts of a model that thinks aloud: the marks around them, and where they end in a text.

An output is the opening mark, thoughts, the closing mark, a gap and the answer. The opening is missing where the prompt ends with
it, and all of it is answer where the model does not think.
"""

from __future__ import annotations

import re
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from tide_runtime.text.prefix_match import common_prefix_length, partial_match_length

Phase = Literal["before", "thoughts", "gap", "answer"]
TAG = re.compile(r"<[^<>\s]+>|\[/?[A-Z][A-Z_ ]+\]|◁[^◁▷\s]+▷")


@dataclass(frozen=True)
class ThoughtMarks:
    """What stands around thoughts.

    Args:
        opening, closing: the marks, without white space.
        lead: between the thoughts and the closing mark.
        gap: between the closing mark and the answer: white space, or the head of the answer.
        ending: mark after the answer; empty: there is none.
    """

    opening: str
    closing: str
    lead: str = ""
    gap: str = ""
    ending: str = ""

    @cached_property
    def first_heads(self) -> dict[str, Phase]:
        """What an output may begin with, and what follows it."""
        heads: dict[str, Phase] = {self.opening: "thoughts"}
        # Behind white space it follows thoughts only, and an answer without them has none (Granite).
        return {**heads, self.answer_head: "answer"} if self.answer_head and not self.space else heads

    @cached_property
    def heads(self) -> dict[str, Phase]:
        """What may follow the closing mark besides the answer itself, and what follows that."""
        gap = self.gap.strip()
        turn = gap.removesuffix(self.answer_head)
        return {gap: "answer", turn + self.opening: "thoughts"} if gap else {}

    @cached_property
    def answer_head(self) -> str:
        """The part of the gap that begins an answer: from a tag as the opening begins with, or all but white space."""
        gap = self.gap.strip()
        tag = TAG.match(self.opening)
        at = gap.find(tag[0]) if tag is not None else -1
        return gap[max(at, 0) :]

    @cached_property
    def space(self) -> str:
        """White space that the gap begins with."""
        return self.gap[: len(self.gap) - len(self.gap.lstrip())]


@dataclass(frozen=True)
class Thoughts:
    """How one output thinks.

    Args:
        begun: the prompt has opened the thoughts.
        budget: tokens, >= 1, after which thoughts are closed, the opening mark's included; None: the model closes them.
    """

    marks: ThoughtMarks
    begun: bool = False
    budget: int | None = None


class Split(NamedTuple):
    """Parts of a text.

    Args:
        thoughts: without marks and without white space around them.
        answer: follows all thoughts.
        before: the text before the answer as it is, marks included.
    """

    thoughts: str
    answer: str
    before: str


class ThoughtSplitter:
    """Splits one output, as it is generated, into thoughts and answer.

    Of the white space between the closing mark and the answer the gap's is dropped, and the rest is the answer's. An opening mark
    that the model repeats is no thought. An answer without thoughts is unchanged.

    Args:
        begun: the prompt has opened the thoughts.
    """

    def __init__(self, marks: ThoughtMarks, begun: bool) -> None:
        self.marks = marks
        self.phase: Phase = "thoughts" if begun else "before"
        self._pending = ""  # of which it is not certain yet what it is
        self._separator, self._in_block = "", False  # put before the next block's first word; it has come

    @property
    def pending(self) -> str:
        """The text of which it is not certain yet what it is."""
        return self._pending

    def copy(self) -> ThoughtSplitter:
        """A splitter that goes on from here by itself."""
        return copy(self)

    def feed(self, text: str, last: bool = False) -> Split:
        """Add output; returns what is certain now, which is all where ``text`` is the ``last``."""
        if self.phase == "answer":
            return Split("", text, "")
        self._pending += text
        thoughts = before = ""
        while self.phase != "answer" and (step := self._step(last)) is not None:
            length, shown = step
            thoughts = thoughts + shown
            before = before + self._pending[:length]
            self._pending = self._pending[length:]
        answer = ""
        if self.phase == "answer":
            answer = self._pending
            self._pending = ""
        return Split(thoughts, answer, before)

    def _step(self, last: bool) -> tuple[int, str] | None:
        """How much of the held text is certain, and the thoughts in it; None: nothing is."""
        if self.phase != "thoughts":
            return self._head(last)
        text = self._pending.lstrip()
        if not self._in_block and text.startswith(self.marks.opening):
            return len(self._pending) - len(text) + len(self.marks.opening), ""
        if not (self._in_block or last) and text and self.marks.opening.startswith(text):
            return None
        at = self._pending.find(self.marks.closing)
        if at >= 0:
            shown = self._words(self._pending[:at])
            self.phase = "gap"
            self._in_block = False
            return at + len(self.marks.closing), shown
        if last:
            self.phase = "answer"
            return len(self._pending), self._words(self._pending)
        words = self._pending[: len(self._pending) - partial_match_length(self._pending, [self.marks.closing])].rstrip()
        return (len(words), self._words(words)) if words else None

    def _head(self, last: bool) -> tuple[int, str] | None:
        is_first = self.phase == "before"
        heads = self.marks.first_heads if is_first else self.marks.heads
        text = self._pending.lstrip()
        may_grow = any(head.startswith(text) and head != text for head in heads)
        if not last and (
            may_grow
            or not self._pending
            or (not is_first and self._pending != self.marks.space and self.marks.space.startswith(self._pending))
        ):
            return None
        if begun := [head for head in heads if text.startswith(head)]:
            head = max(begun, key=len)
            self.phase = heads[head]
            return len(self._pending) - len(text) + len(head), ""
        self.phase = "answer"
        return (0 if is_first else common_prefix_length(self._pending, self.marks.space)), ""

    def _words(self, text: str) -> str:
        """``text`` of thoughts as it is shown: blocks without white space around them, and an empty line between two."""
        if self._in_block:
            return text.rstrip() if text.strip() else ""
        text = text.strip()
        if not text:
            return ""
        self._in_block = True
        separator = self._separator
        self._separator = "\n\n"
        return separator + text
