"""Learns the form of a model's calls from its chat template, by rendering made-up calls.

What differs between a call, two calls, and a call behind text is the frame of a call; where the made-up names and values stand
in it says how arguments are written. A form counts as learned if calls that were not made up for this, with quotes, line
breaks, nested values and no arguments, come back from what the template makes of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import Any, NamedTuple

from tide_runtime.errors import PromptError
from tide_runtime.text.chat_template import render_chat
from tide_runtime.text.thoughts import TAG

from tide_serve.request.call_formats import COUNT, ID, KEY, NAME, Arguments, CallForm, JsonCall, Value
from tide_serve.request.call_values import NoCall, python_arguments, quoted_object
from tide_serve.request.tool_calls import split_calls

# Words that no template has: a prompt with one shows what was called so.
_TOOLS, _KEYS, _IDS = ("qazimor", "drobuli"), ("wexolin", "yrtanoh"), ("zkq0000l1", "zkq0000l2")
_USER, _ANSWER, _VALUE, _VALUE2 = "vreluth", "quastiv", "jubatek", "jubatekb"
_VALUES: dict[str, Any] = {"integer": 7423, "boolean": True, "null": None, "object": {"nimbo": "jorvi"}, "array": ["jorvi", 7]}
_COUNTER = re.compile(r"(?<=[:=\"])\d+(?![\w.])")
_CUT_MARK = re.compile(r"(?:<[^<>]*|\[[A-Z_/]+)$")
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
    try:
        form = _Frame.of(_Turns(template, _definitions(dict.fromkeys(_KEYS, "string"), *_TOOLS))).form()
    except _NotLearned as error:
        return Learned(None, str(error))
    schema = {"type": "object", "properties": {name: {"type": kind} for name, kind in _TYPES.items()}}
    turns = _Turns(template, _definitions(dict.fromkeys(_TYPES, "string"), "get_weather", "now"))
    failed = []
    for name, calls in _CHECKS.items():
        if not form.several and len(calls) > 1:
            continue
        text = turns.of_calls(calls) or ""
        _, found = split_calls(text, {"get_weather": schema, "now": {}}, forms=[form])
        if [(call.name, json.loads(call.arguments)) for call in found] != calls:
            failed.append(name)
    if "a call" in failed:
        return Learned(None, "what the template writes could not be read back")
    return Learned(form, f"not read back: {', '.join(failed)}" if failed else "")


class _NotLearned(Exception):
    """The reason why a template's form is not learned."""


class _Turns:
    """Turns of the assistant as one template writes them, without what the prompt before has."""

    def __init__(self, template: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self._template = template
        self._tools = tools
        user = {"role": "user", "content": _USER}
        self._user = user
        self._prompts = [self._text([user], generation) or "" for generation in (True, False)]
        said = self._turn({"role": "assistant", "content": _ANSWER}) or ""
        self.head, _, self.tail = said.partition(_ANSWER)
        self._tools = ()
        self.frame = (self._text([user], True) or "") + self.tail  # has the marks of turns
        self._tools = tools

    def of_calls(self, calls: Sequence[Call], content: str | None = None) -> str | None:
        """The text of a turn with ``calls``; None where the template refuses it."""
        ids = [*_IDS, "zkq0000l3"]
        body = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for (name, arguments), call_id in zip(calls, ids, strict=False)
        ]
        text = self._turn({"role": "assistant", "content": content, "tool_calls": body})
        return text.removesuffix(self.tail) if text and self.tail else text

    def _turn(self, message: Mapping[str, Any]) -> str | None:
        text = self._text([self._user, message], False)
        if text is None:
            return None
        shared = max(len(_shared(prompt, text)) for prompt in self._prompts)
        return text[shared - _cut_mark(text[:shared]) :]

    def _text(self, messages: list[Mapping[str, Any]], generation: bool) -> str | None:
        for tools in (self._tools or None, None):
            try:
                return render_chat(
                    self._template, messages, special_tokens=_SPECIAL_TOKENS, add_generation_prompt=generation, tools=tools
                )
            except PromptError:
                continue
        return None


class _Spot(NamedTuple):
    """Where a call's name begins, and where its arguments begin and end. ``json``: where the JSON begins that both are in."""

    name: int
    arguments: int
    end: int
    json: int | None


def _definitions(keys: Mapping[str, str], *names: str) -> list[dict[str, Any]]:
    properties = {key: {"type": kind, "description": "One."} for key, kind in keys.items()}
    parameters = {"type": "object", "properties": properties, "required": [*keys][:1]}
    return [
        {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": parameters}} for name in names
    ]


@dataclass(frozen=True)
class _Frame:
    """Renderings of one call, and what was found in them.

    Args:
        one: the text of a call with two arguments.
        two: the same with a second call that has the first argument only; None: the template refuses it.
        behind: the text of the call behind a content; None: the template does not show both.
    """

    turns: _Turns
    one: str
    two: str | None
    behind: str | None

    @classmethod
    def of(cls, turns: _Turns) -> _Frame:
        first = (_TOOLS[0], {_KEYS[0]: _VALUE, _KEYS[1]: _VALUE2})
        one = turns.of_calls([first])
        if one is None or _TOOLS[0] not in one or _VALUE not in one:
            raise _NotLearned("its history shows no calls")
        two = turns.of_calls([first, (_TOOLS[1], {_KEYS[0]: _VALUE})])
        behind = (turns.of_calls([first], _ANSWER) or "").rpartition(_ANSWER)[2]
        return cls(turns, one, two if two and _TOOLS[1] in two else None, behind if _TOOLS[0] in behind else None)

    def form(self) -> CallForm:
        spot, arguments = self._arguments()
        json_call = self._json_call(spot)
        before, after = _marks(self.one[: spot.name]), _marks(self.one[spot.end :])
        named = _marks(self.one[spot.name + len(_TOOLS[0]) : spot.arguments])
        lead = self._lead(spot)
        form = CallForm(named=named, arguments=arguments, as_json=json_call, several=False)
        if self.two is None or (second := self._second(spot)) is None:
            head = before[len(before) - len(json_call.head) :] if json_call is not None else ""
            tail = json_call.tail if json_call is not None else ""
            form = replace(form, begin=before.removesuffix(head), open=head, close=tail, end=after.removeprefix(tail))
        else:
            between = _marks(self.two[spot.end : second])
            close = _whole(_shared(after, between))
            opening = _suffix(before, between[len(close) :])
            cut = _cut_mark(before[: len(before) - len(opening)])
            opening = before[len(before) - len(opening) - cut :]
            if cut and not between.endswith(opening):
                raise _NotLearned("what stands between two calls begins inside a mark")
            sep = between[len(close) : len(between) - len(opening)]
            form = replace(
                form,
                several=True,
                begin=before.removesuffix(opening),
                open=opening,
                close=close,
                sep=sep,
                end=after[len(close) :],
            )
        return self._trimmed(form, lead)

    def _trimmed(self, form: CallForm, lead: str) -> CallForm:
        """``form`` without what thoughts, a head of answers and the end of a turn have put around it."""
        before = form.begin + form.open
        kept = before[len(before) - len(lead) :] if before.endswith(lead) else before
        begin = kept.removesuffix(form.open) if kept.endswith(form.open) else ""
        marks = [mark for mark in TAG.finditer(form.end) if mark[0] in self.turns.frame]
        return replace(form, begin=begin, end=form.end[: marks[0].start()] if marks else form.end)

    def _lead(self, spot: _Spot) -> str:
        """What stands before the name and is the call's own."""
        before = self.one[: spot.name]
        if self.behind is not None:
            other = self.behind[: self.behind.rfind(_TOOLS[0], 0, self.behind.find(_KEYS[0]))]
            own = _suffix(before, other)
        else:
            own = before[len(_shared(before, self.turns.head)) :]
        return _marks(before[len(before) - len(own) - _cut_mark(before[: len(before) - len(own)]) :])

    def _second(self, spot: _Spot) -> int | None:
        """Where the second call's name begins."""
        assert self.two is not None
        key = self.two.find(_KEYS[0], spot.end)
        at = self.two.rfind(_TOOLS[1], spot.end, key)
        return at if at >= 0 else None

    def _json_call(self, spot: _Spot) -> JsonCall | None:
        if spot.json is None:
            return None
        value, _ = json.JSONDecoder().raw_decode(self.one, spot.json)
        listed = isinstance(value, list)
        each = value[0] if listed else value
        begin = self.one.index("{", spot.json)
        _, stop = json.JSONDecoder().raw_decode(self.one, begin)
        inside = (
            ""
            if _TOOLS[0] in (*each, *(v for v in each.values() if isinstance(v, str)))
            else next(k for k, v in each.items() if _TOOLS[0] in str(v))
        )
        keys = each[inside] if inside else each
        name = next((key for key, value in keys.items() if value == _TOOLS[0]), "")
        arguments = next(key for key, value in keys.items() if _KEYS[0] in str(value)) if name else ""
        head, tail = _marks(self.one[begin : spot.name]), _marks(self.one[spot.end : stop])
        return JsonCall(head, tail, name, arguments, inside, listed)

    def _arguments(self) -> tuple[_Spot, Arguments]:
        """Where the call is, and how its arguments are written."""
        key = self.one.find(_KEYS[0])
        name = self.one.rfind(_TOOLS[0], 0, key)
        if name < 0:
            raise _NotLearned("the name stands behind the arguments")
        at = name + len(_TOOLS[0])
        if (found := _json_object(self.one, at)) is not None:
            begin, end = found
            spot = _Spot(name, begin, end, _json_around(self.one, name, end))
            separators = [_between(self.one, _KEYS[0], _VALUE, begin), _between(self.one, _VALUE, _KEYS[1], begin)]
            return spot, Arguments("json", (separators[1].strip('"'), separators[0].strip('"')))
        return self._python(name, at) or self._quoted(name, at) or self._items(name, at)

    def _python(self, name: int, at: int) -> tuple[_Spot, Arguments] | None:
        begin = at + 1
        for end in (match.start() for match in re.finditer(r"\)", self.one[begin:])):
            try:
                if python_arguments(self.one[begin : begin + end], {}) == {_KEYS[0]: _VALUE, _KEYS[1]: _VALUE2}:
                    return _Spot(name, begin, begin + end, None), Arguments("python")
            except NoCall:
                continue
        return None

    def _quoted(self, name: int, at: int) -> tuple[_Spot, Arguments] | None:
        key, value = self.one.find(_KEYS[0], at), self.one.find(_VALUE, at)
        begin, end = self.one.find("{", at, key), self.one.find("}", value)
        quote = self.one[key + len(_KEYS[0]) : value].lstrip(": ")
        try:
            if quote and begin >= 0 and quoted_object(self.one[begin : end + 1], quote) == {_KEYS[0]: _VALUE, _KEYS[1]: _VALUE2}:
                return _Spot(name, begin, end + 1, None), Arguments("quoted", quote=quote)
        except NoCall:
            pass
        return None

    def _items(self, name: int, at: int) -> tuple[_Spot, Arguments]:
        one = self.one
        key1, key2 = one.find(_KEYS[0], at), one.find(_KEYS[1], at)
        value1, value2 = one.find(_VALUE, key1), one.find(_VALUE2, key2)
        if not at <= key1 < value1 < key2 < value2:
            raise _NotLearned("names and values of arguments are not in order")
        between = one[value1 + len(_VALUE) : key2].replace(_KEYS[0], KEY)
        behind = one[value2 + len(_VALUE2) :].replace(_KEYS[1], KEY)
        after = _whole(_shared(behind, between))
        key_open = _suffix(one[at:key1], between[len(after) :])
        key_open = one[key1 - len(key_open) - _cut_mark(one[at : key1 - len(key_open)]) : key1]
        sep = between[len(after) : len(between) - len(key_open)]
        if not key_open or not after.strip():
            raise _NotLearned("no marks around names and values of arguments")
        values = self._values(key_open, sep)
        end = value2 + len(_VALUE2) + len(after) + after.count(KEY) * (len(_KEYS[1]) - 1)
        return _Spot(name, key1 - len(key_open), end, None), Arguments("items", key_open=key_open, sep=sep, values=values)

    def _values(self, key_open: str, sep: str) -> tuple[Value, ...]:
        """What stands around values of each type."""
        found: dict[tuple[str, str], set[str]] = {}
        for kind, value in {"string": _VALUE, **_VALUES}.items():
            text = self.turns.of_calls([(_TOOLS[0], {_KEYS[0]: value, _KEYS[1]: _VALUE2})]) or ""
            key = text.find(key_open + _KEYS[0])
            begin, end = key + len(key_open + _KEYS[0]), text.find(sep + key_open + _KEYS[1])
            inner = text[begin:end].replace(_KEYS[0], KEY)
            for spelled in (_VALUE,) if kind == "string" else (json.dumps(value), str(value)):
                if key >= 0 and spelled in inner:
                    before, _, after = inner.rpartition(spelled)
                    found.setdefault((before, after), set()).add(kind)
                    break
        if not any("string" in kinds for kinds in found.values()):
            raise _NotLearned("values of arguments are not shown as they are")
        if len(found) == 1:
            return tuple(Value(*around) for around in found)
        return tuple(
            Value(*around, types=(*sorted(kinds), *(["number"] if "integer" in kinds else []))) for around, kinds in found.items()
        )


def _json_object(text: str, at: int) -> tuple[int, int] | None:
    """Where the JSON object of the made-up arguments begins and ends."""
    for match in re.finditer(r"\{", text[at:]):
        try:
            value, end = json.JSONDecoder().raw_decode(text, at + match.start())
        except ValueError:
            continue
        if isinstance(value, dict) and value.get(_KEYS[0]) == _VALUE:
            return at + match.start(), end
    return None


def _json_around(text: str, name: int, end: int) -> int | None:
    """Where the outermost JSON value begins that has the name and the arguments."""
    for match in re.finditer(r"[{\[]", text[:name]):
        try:
            _, stop = json.JSONDecoder().raw_decode(text, match.start())
        except ValueError:
            continue
        if stop >= end:
            return match.start()
    return None


def _between(text: str, one: str, other: str, at: int) -> str:
    begin = text.index(one, at) + len(one)
    return text[begin : text.index(other, begin)]


def _marks(text: str) -> str:
    """``text`` with what changes from call to call as such."""
    for word, wild in (*((word, NAME) for word in _TOOLS), *((word, ID) for word in _IDS)):
        text = text.replace(word, wild)
    return _COUNTER.sub(COUNT, text)


def _shared(one: str, other: str) -> str:
    """The text that both begin with."""
    return one[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))]


def _suffix(one: str, other: str) -> str:
    return _shared(one[::-1], other[::-1])[::-1]


def _cut_mark(text: str) -> int:
    """Length of the end of ``text`` that begins a mark and does not end it."""
    match = _CUT_MARK.search(text)
    return len(text) - match.start() if match is not None else 0


def _whole(text: str) -> str:
    return text[: len(text) - _cut_mark(text)]
