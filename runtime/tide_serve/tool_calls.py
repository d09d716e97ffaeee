"""Finds tool calls in a model's output as it is generated."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_BARE = re.compile(r'\s*\{\s*"name"\s*:')  # a call without tags begins so
_BARE_START = re.compile(r'\s*(\{\s*("(n(a(m(e("(\s*)?)?)?)?)?)?)?)?$')  # and so may an unfinished beginning of it


@dataclass(frozen=True)
class ToolCall:
    """A call of a function; ``arguments`` is JSON, as OpenAI gives it."""

    id: str
    name: str
    arguments: str

    def body(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallParser:
    """Splits one output into text and calls.

    A call is a JSON object with ``name`` and ``arguments`` (or ``parameters``, as Llama 3 writes) between <tool_call> and
    </tool_call>, a list of them there, or one that is the whole output. What is not a call of one of ``names`` stays text,
    as does a call that the end of the output cuts off. White space beside calls is dropped.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""  # not yet text and not yet a call
        self._in_block, self._bare, self._behind_call = False, True, False
        self.calls: list[ToolCall] = []

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Add output; returns the text and the calls that are certain now."""
        self._held += text
        if self._bare:
            if _BARE.match(self._held) or _BARE_START.match(self._held):
                return "", []
            self._bare = False
        shown, found = "", len(self.calls)
        while True:
            before, tag, behind = self._held.partition(CLOSING if self._in_block else OPENING)
            if not tag:
                break
            shown += self._block(before, OPENING, CLOSING) if self._in_block else self._text(before.rstrip())
            self._held, self._in_block = behind, not self._in_block
        if not self._in_block:
            certain = len(self._held) - _uncertain(self._held)
            shown, self._held = shown + self._text(self._held[:certain]), self._held[certain:]
        return shown, self.calls[found:]

    def finish(self) -> tuple[str, list[ToolCall]]:
        """The rest, at the end of the output."""
        found, rest = len(self.calls), self._held
        self._held = ""
        if self._in_block:
            return self._block(rest, OPENING, ""), self.calls[found:]
        if self._bare:
            return self._block(rest, "", ""), self.calls[found:]
        return self._text(rest if not self.calls else rest.rstrip()), []

    def _text(self, text: str) -> str:
        """``text``, without white space that follows a call."""
        shown = text.lstrip() if self._behind_call else text
        self._behind_call = self._behind_call and not shown
        return shown

    def _block(self, inside: str, opening: str, closing: str) -> str:
        """Take the calls ``inside`` a block; returns the block where it has none."""
        calls = _calls(inside, self._names)
        self.calls += calls
        self._behind_call = bool(calls)
        return "" if calls else opening + inside + closing


def split_calls(text: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
    """The text and the calls of a whole output. Without ``names`` all of it is text."""
    if not names:
        return text, []
    parser = ToolCallParser(names)
    return parser.feed(text)[0] + parser.finish()[0], parser.calls


def _calls(text: str, names: Collection[str]) -> list[ToolCall]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [_call(each, names) for each in (found if isinstance(found, list) else [found])]
    return [call for call in calls if call is not None] if None not in calls else []


def _call(value: Any, names: Collection[str]) -> ToolCall | None:
    if not isinstance(value, dict) or value.get("name") not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(f"call_{uuid4().hex[:24]}", value["name"], json.dumps(arguments, ensure_ascii=False))


def _uncertain(text: str) -> int:
    """Length of the end of ``text`` that may turn out to belong to a call: a part of the tag, and white space before it."""
    for length in range(min(len(OPENING) - 1, len(text)), 0, -1):
        if text.endswith(OPENING[:length]):
            break
    else:
        length = 0
    return len(text) - len(text[: len(text) - length].rstrip())
