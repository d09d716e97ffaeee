"""Learns the form of a model's calls from its chat template, by rendering made-up calls.

What differs between a call, two calls, and a call behind text is the frame of a call; where the made-up names and values stand
in it says how arguments are written. A form counts as learned if calls that were not made up for this, with quotes, line
breaks, nested values and no arguments, come back from what the template makes of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from tide_runtime.errors import PromptError
from tide_runtime.text.chat_template import analysed, render_chat
from tide_runtime.text.prefix_match import common_prefix_length
from tide_runtime.text.thoughts import TAG

from tide_serve.request.call_arguments import Arguments, Items, Json, Literals, Value
from tide_serve.request.call_formats import CallForm, JsonCall
from tide_serve.request.call_reader import COUNT, ID, KEY, NAME, NoCall, Reading, Unfinished
from tide_serve.request.tool_calls import split_calls

# Words that no template has: a prompt with one shows what was called so.
_TOOLS = ("qazimor", "drobuli")
_KEYS = ("wexolin", "yrtanoh")
_IDS = ("zkq0000l1", "zkq0000l2", "zkq0000l3")
_USER = "vreluth"
_ANSWER = "quastiv"
_VALUE = "jubatek"
_VALUE2 = "jubatekb"
_ARGUMENTS = {_KEYS[0]: _VALUE, _KEYS[1]: _VALUE2}
_VALUES: dict[str, Any] = {
    "string": _VALUE, "integer": 7423, "boolean": True, "null": None, "object": {"nimbo": "jorvi"}, "array": ["jorvi", 7]
}  # fmt: skip
_COUNTER = re.compile(r"(?<=[:=\"])\d+(?![\w.])")
_MARK_OR_LETTER = re.compile(r"<[^<>\s\ue000-\ue003]*>?|\[[A-Z_/]+\]|.", re.DOTALL)
_SPECIAL_TOKENS = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")

Call = tuple[str, Mapping[str, Any]]
# Calls that a learned form has to read back.
_WEATHER = {
    "city": 'Sao "Paulo" é',
    "days": 3,
    "wet": True,
    "note": "line one\nline 'two'",
    "tree": {"a": [1, {"b": "c"}]},
    "none": None,
}
_CHECKS: dict[str, list[Call]] = {
    "a call": [("get_weather", {"city": "Oslo", "days": 2})],
    "no arguments": [("now", {})],
    "several calls": [("get_weather", {"city": "Oslo"}), ("get_weather", {"city": "Rome"}), ("now", {})],
    "quotes and nested values": [("get_weather", _WEATHER)],
}
_TYPES = {"city": "string", "days": "integer", "wet": "boolean", "note": "string", "tree": "object", "none": "null"}
_CHECKED: dict[str, Any] = {"get_weather": {"properties": {name: {"type": kind} for name, kind in _TYPES.items()}}, "now": {}}
_DEFINITIONS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}}}
    for name in (*_TOOLS, *_CHECKED)
]


@dataclass(frozen=True)
class Learned:
    """What a template says about calls.

    Args:
        form: None: nothing that can be read back.
        flaw: why it is None, or what the form does not read back; empty: all is well.
    """

    form: CallForm | None
    flaw: str = ""


@lru_cache(maxsize=16)
def learned_form(template: str) -> Learned:
    """The form of calls in ``template``."""
    turns = _Turns(template)
    try:
        form = _form(turns)
    except _NotLearned as error:
        return Learned(None, str(error))
    failed = []
    for name, calls in _CHECKS.items():
        if form.several or len(calls) == 1:
            _, found = split_calls(turns.of_calls(calls), _CHECKED, forms=[form])
            failed += [name] if [(call.name, json.loads(call.arguments)) for call in found] != calls else []
    if "a call" in failed:
        return Learned(None, "what the template writes could not be read back")
    return Learned(form, f"not read back: {', '.join(failed)}" if failed else "")


class _NotLearned(Exception):
    """The reason why a template's form is not learned."""


class _Turns:
    """Turns of the assistant as one template writes them, without what the prompt before has.

    ``head``, ``tail``: what stands around a plain answer. ``frame``: a text with the marks of turns.
    """

    def __init__(self, template: str) -> None:
        self._template = template
        self._user = {"role": "user", "content": _USER}
        self._prompts = [self._text([self._user], begun) for begun in (True, False)]
        self.head, _, self.tail = self._turn({"role": "assistant", "content": _ANSWER}).partition(_ANSWER)
        self.frame = self._text([self._user], True, tools=None) + self.tail

    def of_calls(self, calls: Sequence[Call], content: str | None = None) -> str:
        """The text of a turn with ``calls``; empty where the template refuses it."""
        if len(calls) > 1 and not analysed(self._template).turns.several_calls:  # each would be shown as a turn of its own
            return ""
        body = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for (name, arguments), call_id in zip(calls, _IDS, strict=False)
        ]
        return self._turn({"role": "assistant", "content": content, "tool_calls": body}).removesuffix(self.tail)

    def probe(self, *arguments: Mapping[str, Any], content: str | None = None) -> str:
        """A turn of calls of the made-up tools, which are `NAME` in it, and `ID` the ids."""
        text = self.of_calls([*zip(_TOOLS, arguments, strict=False)], content)
        for word, wild in (*((word, NAME) for word in _TOOLS), *((word, ID) for word in _IDS)):
            text = text.replace(word, wild)
        return text

    def _turn(self, message: Mapping[str, Any]) -> str:
        text = self._text([self._user, message], False)
        return text[max(len(_shared(prompt, text)) for prompt in self._prompts) :]

    def _text(self, messages: list[Any], begun: bool, tools: Sequence[Mapping[str, Any]] | None = _DEFINITIONS) -> str:
        for shown in (tools, None):
            with suppress(PromptError):
                variables: dict[str, Any] = {"add_generation_prompt": begun, "tools": shown}
                return render_chat(self._template, messages, special_tokens=_SPECIAL_TOKENS, **variables)
        return ""


def _form(turns: _Turns) -> CallForm:
    """The form of the made-up calls. Raises _NotLearned."""
    one = turns.probe(_ARGUMENTS)
    if NAME not in one or _VALUE not in one:
        raise _NotLearned("its history shows no calls")
    name = one.rfind(NAME, 0, one.find(_KEYS[0]))
    if name < 0:
        raise _NotLearned("the name stands behind the arguments")
    begin, end, arguments = _arguments(turns, one, name + 1)
    call = _json_call(one, name, end) if isinstance(arguments, Json) else None
    before, behind = _with_counters(one[:name]), _with_counters(one[end:])
    if (between := _between_calls(turns, end)) is not None:
        close, sep, opening = _frame(before, between, behind)
    else:
        close, sep, opening = (call.tail, "", call.head) if call is not None else ("", "", "")
    lead = _lead(turns, one[:name])
    rest = behind.removeprefix(close)
    turn_marks = [mark.start() for mark in TAG.finditer(rest) if mark[0] in turns.frame]
    return CallForm(
        begin=lead.removesuffix(opening) if lead.endswith(opening) else "",
        open=opening,
        named=_with_counters(one[name + 1 : begin]),
        close=close,
        sep=sep,
        end=rest[: turn_marks[0]] if turn_marks else rest,
        several=between is not None,
        arguments=arguments,
        as_json=call,
    )


def _between_calls(turns: _Turns, end: int) -> str | None:
    """What stands between two calls, whose first ends as a single one does; None: the template refuses two."""
    two = turns.probe(_ARGUMENTS, {_KEYS[0]: _VALUE})
    key = two.find(_KEYS[0], end)
    name = two.rfind(NAME, end, key) if key >= 0 else -1
    return _with_counters(two[end:name]) if name >= 0 else None


def _lead(turns: _Turns, before: str) -> str:
    """The end of ``before``, the text before the name, that is the call's own: not of thoughts, nor the head of an answer."""
    behind = turns.probe(_ARGUMENTS, content=_ANSWER).rpartition(_ANSWER)[2]
    if NAME in behind:
        return _with_counters(_shared_end(before, behind[: behind.rfind(NAME, 0, behind.find(_KEYS[0]))]))
    return _with_counters(before[len(_shared(before, turns.head)) :])


def _json_call(one: str, name: int, end: int) -> JsonCall | None:
    """The outermost JSON value that has the name and the arguments, which end at ``end``."""
    for match in re.finditer(r"[{\[]", one[:name]):
        value, stop = _json_at(one, match.start())
        call = value[0] if isinstance(value, list) and value else value
        if stop < end or not isinstance(call, dict):
            continue
        begin = one.index("{", match.start())
        head, tail = _with_counters(one[begin:name]), _with_counters(one[end : _json_at(one, begin)[1]])
        keys = call["function"] if isinstance(call.get("function"), dict) else call
        named = next((key for key, each in keys.items() if each == NAME), "")
        given = next((key for key, each in keys.items() if each == _ARGUMENTS), "") if named else ""
        return JsonCall(head, tail, named, given, listed=isinstance(value, list))
    return None


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at ``at``, and where it ends; 0: there is none."""
    with suppress(ValueError):
        return json.JSONDecoder().raw_decode(text, at)
    return None, 0


# --- arguments


def _arguments(turns: _Turns, one: str, at: int) -> tuple[int, int, Arguments]:
    """Beginning and end of the arguments in ``one``, and their form. ``at``: the place after the name."""
    key, value = one.find(_KEYS[0], at), one.find(_VALUE, at)
    colon = one[key + len(_KEYS[0]) : value]
    comma = _between(one[value:], _VALUE, _KEYS[1])
    json_form = Json((comma.strip('"'), colon.strip('"')))
    quote = colon.lstrip(": ")
    encodings = [json_form, Literals(), *([Literals(quote)] if quote else [])]
    for begin, encoding in product(range(at, key + 1), encodings):
        reading = Reading(one, {}, True, begin)
        with suppress(NoCall, Unfinished):
            if not one[begin].isspace() and encoding.read(reading, {}, "") == _ARGUMENTS:
                return begin, reading.at, encoding
    return _items(turns, one, at)


def _items(turns: _Turns, one: str, at: int) -> tuple[int, int, Items]:
    key1, key2 = one.find(_KEYS[0], at), one.find(_KEYS[1], at)
    value1, value2 = one.find(_VALUE, key1), one.find(_VALUE2, key2)
    if not at <= key1 < value1 < key2 < value2:
        raise _NotLearned("names and values of arguments are not in order")
    between = one[value1 + len(_VALUE) : key2].replace(_KEYS[0], KEY)
    after, sep, key_open = _frame(one[at:key1], between, one[value2 + len(_VALUE2) :].replace(_KEYS[1], KEY))
    if not key_open or not after.strip():
        raise _NotLearned("no marks around names and values of arguments")
    end = value2 + len(_VALUE2) + len(after.replace(KEY, _KEYS[1]))
    return key1 - len(key_open), end, Items(key_open, tuple(_values(turns, key_open, sep)), sep)


def _values(turns: _Turns, key_open: str, sep: str) -> Iterator[Value]:
    """What stands around values of each type."""
    found: dict[tuple[str, str], list[str]] = {}
    for kind, value in _VALUES.items():
        text = turns.probe({_KEYS[0]: value, _KEYS[1]: _VALUE2})
        inner = _between(text, key_open + _KEYS[0], sep + key_open + _KEYS[1]).replace(_KEYS[0], KEY)
        spellings = [_VALUE] if kind == "string" else [json.dumps(value), str(value)]
        if spelled := next((each for each in spellings if each in inner), None):
            before, _, after = inner.rpartition(spelled)
            found.setdefault((before, after), []).extend([kind, "number"] if kind == "integer" else [kind])
    if not any("string" in kinds for kinds in found.values()):
        raise _NotLearned("values of arguments are not shown as they are")
    for around, kinds in found.items():
        yield Value(*around, types=tuple(kinds) if len(found) > 1 else ())


# --- parts of renderings


def _between(text: str, one: str, other: str) -> str:
    return text.partition(one)[2].partition(other)[0]


def _with_counters(text: str) -> str:
    """``text`` with numbers that count calls as such."""
    return _COUNTER.sub(COUNT, text)


def _frame(before: str, between: str, behind: str) -> tuple[str, str, str]:
    """What ends each of two neighbours, stands between them, and begins each, after what stands around and between them."""
    close = _shared(behind, between)
    opening = _shared_end(before, between[len(close) :])
    return close, between[len(close) : len(between) - len(opening)], opening


def _shared(one: str, other: str) -> str:
    """The text that both begin with, in whole marks."""
    marks, others = map(_MARK_OR_LETTER.findall, (one, other))
    return "".join(marks[: common_prefix_length(marks, others)])


def _shared_end(one: str, other: str) -> str:
    marks, others = map(_MARK_OR_LETTER.findall, (one, other))
    return "".join(marks[len(marks) - common_prefix_length(marks[::-1], others[::-1]) :])
