"""Splits a model's output, as it is generated, into thoughts, text and calls of tools."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from tide_runtime import Chunk
from tide_runtime.text.prefix_match import partial_match_length
from tide_runtime.text.thoughts import ThoughtSplitter

from tide_serve.request.call_formats import ToolCall
from tide_serve.request.tool_calls import ToolCallParser


class AnswerParts(NamedTuple):
    """Parts of an output, which follow each other in this order."""

    thoughts: str
    text: str
    calls: list[ToolCall]


class AnswerParser:
    """Reads one output. Calls are found behind the thoughts only.

    Args:
        thoughts: finds where thoughts end; None: there are none.
        tools: finds calls; None: there are none.
        hidden: marks of thoughts and answers, which are not for the client where they mark nothing; longer ones first.
    """

    def __init__(self, thoughts: ThoughtSplitter | None, tools: ToolCallParser | None, hidden: Collection[str] = ()) -> None:
        self._thoughts = thoughts
        self._tools = tools
        self._hidden = hidden
        self._pending = ""  # what may be a part of a mark: a stop string that begins inside one has cut it

    @property
    def calls(self) -> list[ToolCall]:
        """All calls so far."""
        return self._tools.calls if self._tools is not None else []

    def read(self, chunks: Sequence[Chunk]) -> AnswerParts:
        """`feed` for ``chunks``, which follow each other."""
        return self.feed("".join([chunk.text for chunk in chunks]), last=chunks[-1].generation is not None)

    def feed(self, text: str, last: bool = False) -> AnswerParts:
        """Add output; returns the parts that are certain now, which are all where ``text`` is the ``last``."""
        thoughts = ""
        calls = list[ToolCall]()
        if self._thoughts is not None:
            thoughts, text, _ = self._thoughts.feed(text, last)
        if self._tools is not None:  # before marks are hidden, as a call may have the same ones
            text, calls = self._tools.feed(text, last)
        text = self._pending + text
        for mark in self._hidden:
            thoughts = thoughts.replace(mark, "")
            text = text.replace(mark, "")
        certain = len(text) - (0 if last else partial_match_length(text, self._hidden))
        text, self._pending = text[:certain], text[certain:]
        return AnswerParts(thoughts, text, calls)
