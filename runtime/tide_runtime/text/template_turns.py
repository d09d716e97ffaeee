"""Which orders of messages a chat template takes, found by rendering made-up chats, and other chats folded into those.

Templates refuse, or leave out without a word, system messages that are not the first, users' messages that follow each other, and
the second call of a message. Folding keeps every text at its place: it moves into the turn beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tide_runtime.text.message_parts import joined_parts

Message = Mapping[str, Any]
Render = Callable[[list[Message]], str | None]

_SYSTEM_ROLES = ("system", "developer")
_WORD = "drobuli"  # a word that no template contains
_IDS = ("a1b2c3d4e", "b1b2c3d4e")
_TEXTS = ("content", "reasoning_content", "reasoning")


@dataclass(frozen=True)
class TemplateTurns:
    """The orders of messages that a template takes.

    Args:
        system: where it takes system messages.
        repeated: messages of a role may follow each other.
        after_results: a user's message may follow the results of calls.
        several_calls: a message may have several calls.
    """

    system: Literal["anywhere", "first", "never"] = "anywhere"
    repeated: bool = True
    after_results: bool = True
    several_calls: bool = True

    @classmethod
    def of(cls, render: Render, shows_calls: bool) -> TemplateTurns:
        """Those of a template. ``render`` gives its text for messages; None where it fails."""

        def takes(turns: TemplateTurns, roles: str) -> bool:
            chat = _chat(roles)
            text = render(turns.folded(chat)) or ""
            return all(f"{_WORD}{index}x" in text for index in range(len(roles)))

        def first_that_takes(roles: str, *tries: TemplateTurns) -> TemplateTurns:
            """``tries[0]``, whatever it takes, where no other takes more."""
            return next((tried for tried in tries if takes(tried, roles)), tries[0])

        turns = cls()
        if not takes(turns, "uau"):
            return turns
        turns = first_that_takes("uuaau", turns, replace(turns, repeated=False))
        turns = first_that_takes("ssusasus", turns, replace(turns, system="first"), replace(turns, system="never"))
        if shows_calls:
            turns = first_that_takes("uccrra", turns, replace(turns, several_calls=False))
            turns = first_that_takes("ucru", turns, replace(turns, after_results=False))
        return turns

    @property
    def notes(self) -> tuple[str, ...]:
        """What is folded, in words."""
        system = {
            "anywhere": "",
            "first": "system messages are joined at the beginning, later ones become the user's",
            "never": "system messages become the user's",
        }
        notes = (
            system[self.system],
            "" if self.repeated else "messages of a role that follow each other are joined",
            "" if self.after_results else "a user's text behind results of calls joins the last result",
            "" if self.several_calls else "of several calls each gets a message, followed by its result",
        )
        return tuple(filter(None, notes))

    def folded(self, messages: Sequence[Message]) -> list[Message]:
        """``messages`` in an order that the template takes."""
        folded: list[Message] = []
        joins = False  # the last message was the system's and is the user's
        for message in messages if self.several_calls else _with_one_call_each(messages):
            role = message["role"]
            last = folded[-1] if folded else {"role": None}
            moved = role in _SYSTEM_ROLES and self._moves(last["role"])
            message = {**message, "role": "user"} if moved else message
            if self._joins(last["role"], message["role"], joins or moved):
                folded[-1] = _joined(last, message)
            else:
                folded.append(message)
            joins = moved
        return folded

    def _moves(self, last: str | None) -> bool:
        """Whether a system message that follows the role ``last`` becomes the user's."""
        return self.system == "never" or (self.system == "first" and last is not None and last not in _SYSTEM_ROLES)

    def _joins(self, last: str | None, role: str, moved: bool) -> bool:
        """Whether a message of ``role`` becomes a part of the one before. ``moved``: one of the two was the system's."""
        if last == role == "user":
            return moved or not self.repeated
        if last == "tool" and role == "user":
            return not self.after_results
        if last in _SYSTEM_ROLES and role in _SYSTEM_ROLES:
            return self.system == "first"
        return last == role == "assistant" and not self.repeated


def _with_one_call_each(messages: Sequence[Message]) -> list[Message]:
    """``messages`` in which each call has a message of its own, with its results behind it."""
    split: list[Message] = []
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            split.append(message)
            continue
        end = next((at for at in range(index + 1, len(messages)) if messages[at]["role"] != "tool"), len(messages))
        results = messages[index + 1 : end]
        for number, call in enumerate(calls):
            rest = message if number == 0 else {"role": message["role"], "content": None}
            split += [{**rest, "tool_calls": [call]}, *(result for result in results if _is_of(result, call))]
        others = [result for result in results if not any(_is_of(result, call) for call in calls)]
        return [*split, *others, *_with_one_call_each(messages[end:])]
    return split


def _is_of(result: Message, call: Message) -> bool:
    return result.get("tool_call_id") == call.get("id")


def _joined(one: Message, other: Message) -> Message:
    """``one`` with the texts and calls of ``other`` behind its own."""
    both = dict(one)
    for name in _TEXTS:
        texts = [joined_parts(message[name]) for message in (one, other) if message.get(name)]
        if texts:
            both[name] = "\n\n".join(texts)
    if calls := [*(one.get("tool_calls") or ()), *(other.get("tool_calls") or ())]:
        both["tool_calls"] = calls
    return both


def _chat(roles: str) -> list[Message]:
    """A chat of ``roles``: system, user, assistant, call, result; each has a word of its own, and calls that follow each other a
    message."""
    names = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "r": "tool"}
    chat: list[Any] = []
    for index, role in enumerate(roles):
        word = f"{_WORD}{index}x"
        number = roles[:index].count(role)
        message: dict[str, Any] = {"role": names[role], "content": word}
        if role == "r":
            message |= {"tool_call_id": _IDS[number], "name": _WORD}
        elif role == "c":
            call = {"id": _IDS[number], "type": "function", "function": {"name": _WORD, "arguments": {"wexolin": word}}}
            message |= {"content": None, "tool_calls": [call]}
            if roles[index - 1] == "c":
                chat[-1]["tool_calls"].append(call)
                continue
        chat.append(message)
    return chat
