"""The form in which a model writes calls of tools, and forms of published models for where a template does not say it.

An output has ``begin``, then calls with ``sep`` between them, then ``end``. A call is ``open``, the name, ``named``, the
arguments and ``close``. All are literals in which white space is free; `ID` and the like stand for what changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal
from uuid import uuid4

# In a literal: an id, a number that counts calls, the name of the call's tool once more, the name of the item once more.
ID, COUNT, NAME, KEY = "\ue000", "\ue001", "\ue002", "\ue003"
_PIECE = re.compile(r"<[^<>\s\ue000-\ue002]*>?|\[[A-Z_/]+\]|[\ue000-\ue003]|[^\s<\[\ue000-\ue003]+|\[")
_MARK = re.compile(r"<|\[[A-Z]")


@dataclass(frozen=True)
class ToolCall:
    """A call of a function; ``arguments``: a JSON object (RFC 8259) in UTF-8."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid4().hex[:24]}")

    def body(self) -> dict[str, Any]:
        """The call as OpenAI's API has it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Value:
    """What stands before and after the value of an item.

    Args:
        types: JSON types of the values that these stand around; empty: all, so the type follows from the schema.
    """

    before: str
    after: str
    types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arguments:
    """How the arguments of a call are written.

    Args:
        kind: a JSON object; arguments of a Python call; an object whose strings stand between ``quote``; or items, each with
            ``key_open``, its name, and its value with what stands around it, and with ``sep`` between items.
        separators: of a JSON object: between its members, and between name and value.
    """

    kind: Literal["json", "python", "quoted", "items"] = "json"
    separators: tuple[str, str] = (", ", ": ")
    quote: str = ""
    key_open: str = ""
    sep: str = ""
    values: tuple[Value, ...] = ()

    def text(self, arguments: Mapping[str, Any]) -> str:
        """``arguments`` as a model writes them."""
        if self.kind == "json" or not isinstance(arguments, Mapping):
            return json.dumps(arguments, ensure_ascii=False, separators=self.separators)
        if self.kind == "python":
            return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        if self.kind == "quoted":
            return self._quoted(arguments)
        return self.sep.join(self._item(name, value) for name, value in arguments.items())

    def _quoted(self, value: Any) -> str:
        if isinstance(value, Mapping):
            return "{" + ",".join(f"{name}:{self._quoted(each)}" for name, each in value.items()) + "}"
        if isinstance(value, list):
            return f"[{','.join(map(self._quoted, value))}]"
        return f"{self.quote}{value}{self.quote}" if isinstance(value, str) else json.dumps(value)

    def _item(self, name: str, value: Any) -> str:
        is_text = isinstance(value, str)
        around = next((each for each in self.values if not each.types or is_text == ("string" in each.types)), self.values[0])
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        return f"{self.key_open}{name}{around.before}{text}{around.after}".replace(KEY, name)


@dataclass(frozen=True)
class JsonCall:
    """A call that is one JSON value, or one of the list of calls that is one.

    Args:
        head, tail: of the value, before the name and behind the arguments; ``open`` ends and ``close`` begins with them.
        name, arguments: keys; no name: the name is the key of the arguments.
        inside: key of the object that has both; empty: the value itself has them.
        listed: ``begin`` ends with the bracket of the list.
    """

    head: str = '{"name": "'
    tail: str = "}"
    name: str = "name"
    arguments: str = "arguments"
    inside: str = ""
    listed: bool = False


@dataclass(frozen=True)
class CallForm:
    """A form of calls. ``several``: an output may have more than one."""

    begin: str = ""
    open: str = ""
    named: str = ""
    close: str = ""
    sep: str = ""
    end: str = ""
    several: bool = True
    arguments: Arguments = Arguments()
    as_json: JsonCall | None = None

    @cached_property
    def call_open(self) -> str:
        """``open`` without what is JSON's."""
        return self.open if self.as_json is None else self.open.removesuffix(self.as_json.head)

    @cached_property
    def call_close(self) -> str:
        """``close`` without what is JSON's."""
        return self.close if self.as_json is None else self.close.removeprefix(self.as_json.tail)

    @cached_property
    def lead(self) -> str:
        """What stands before the first call, without what is JSON's."""
        if self.as_json is not None and self.as_json.listed:
            return self.begin.rstrip().removesuffix("[")
        return self.begin + self.call_open

    @cached_property
    def behind(self) -> tuple[str, ...]:
        """Pieces that may stand behind a call and are no text."""
        end = self.end.lstrip().removeprefix("]") if self.as_json is not None and self.as_json.listed else self.end
        return tuple(piece for piece in pieces(self.call_close + "\n" + self.sep + "\n" + end) if piece not in (ID, COUNT, NAME))

    @cached_property
    def openings(self) -> tuple[tuple[str, str], ...]:
        """(phrase, lead): calls may begin with a ``phrase``, of a ``lead`` whose first marks a model may leave out."""
        marks = [piece.start() for piece in _PIECE.finditer(self.lead) if _MARK.match(piece[0])]
        leads = [self.lead[at:] for at in marks]
        first = self.lead.strip()
        if first and first[0] not in "[({`" and (not marks or self.lead[: marks[0]].strip()):
            leads.insert(0, first)
        phrases = ["".join(pieces(lead)[: 1 + (len(pieces(lead)[0]) == 1)]) for lead in leads]
        return tuple((phrase, lead) for phrase, lead in zip(phrases, leads, strict=True) if len(phrase) > 1)

    def text(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """``calls``, each a name and arguments, as a model writes them."""
        written = [
            f"{self.open}{name}{self.named}{self.arguments.text(arguments)}{self.close}".replace(NAME, name)
            for name, arguments in calls
        ]
        text = self.begin + self.sep.join(written) + self.end
        return text.replace(ID, "000000000").replace(COUNT, "0")

    @property
    def literals(self) -> str:
        """All text that is the form's."""
        around = [text for value in self.arguments.values for text in (value.before, value.after)]
        parts = [self.begin, self.open, self.named, self.close, self.sep, self.end]
        return "\n".join([*parts, self.arguments.key_open, self.arguments.quote, *around])


@lru_cache(1024)
def pieces(literal: str) -> list[str]:
    """Parts of ``literal`` between which white space is free."""
    return _PIECE.findall(literal)


def json_form(
    begin: str = "", close: str = "", *, listed: bool = False, end: str = "", keys: tuple[str, str] = ("name", "arguments")
) -> CallForm:
    """Calls in JSON with ``begin`` before each, or before the list of them."""
    name, arguments = keys
    call = JsonCall(head=f'{{"{name}": "' if name else '{"', name=name, arguments=arguments, listed=listed)
    form = CallForm(
        named=f'", "{arguments}": ' if name else '": ', close=call.tail + close, as_json=call, several=listed or bool(close)
    )
    if listed:
        return replace(form, begin=begin + "[", open=call.head, sep=", ", end="]" + end)
    return replace(form, open=begin + call.head, sep="\n" if form.several else "")


def _items(key_open: str, *values: tuple[str, str]) -> Arguments:
    return Arguments("items", key_open=key_open, values=tuple(Value(*value) for value in values))


def _dsml(section: str) -> CallForm:
    """DeepSeek V3.2 and V4."""
    other = ("integer", "number", "boolean", "null", "object", "array")
    marks = [
        Value(f'" string="{word}">', "</｜DSML｜parameter>\n", types) for word, types in (("true", ("string",)), ("false", other))
    ]
    items = Arguments("items", key_open='<｜DSML｜parameter name="', values=tuple(marks))
    begin, end = f"<｜DSML｜{section}>\n", f"</｜DSML｜{section}>"
    return CallForm(begin, '<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n", "", end, arguments=items)


_PYTHON, _PARAMETERS = Arguments("python"), _items("<parameter=", (">\n", "\n</parameter>\n"))
_MINIMAX = ("<minimax:tool_call>\n", '<invoke name="', '">\n', "</invoke>\n", "", "</minimax:tool_call>")
_INVOKED = _items('<parameter name="', ('">', "</parameter>\n"))
HERMES = json_form("<tool_call>\n", "\n</tool_call>")
# Any model may write these: Hermes' JSON, and Qwen3-Coder's and Llama 3's functions.
USUAL = (
    HERMES,
    CallForm("", "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "\n", arguments=_PARAMETERS),
    CallForm("", "<function=", ">", "</function>"),
)
# Without a mark: the whole output, so any model may write them too.
BARE = (json_form(), json_form("```json\n", "\n```"), CallForm("[", "", "(", ")", ", ", "]", arguments=_PYTHON))
# gpt-oss: the recipient stands behind the channel or before it, and what the prompt ends with may come once more.
HARMONY = tuple(
    CallForm("", f"{open}to=functions.", f"{channel}{kind}<|message|>", "<|call|>", several=False)
    for kind in (" <|constrain|>json", " json", "")
    for open, channel in (
        ("<|channel|>commentary ", ""),
        (f"<|channel|>{NAME} ", ""),
        (f"<|start|>assistant<|channel|>{NAME} ", ""),
        ("<|start|>assistant ", f"<|channel|>{NAME}"),
        (" ", f"<|channel|>{NAME}"),
    )
)
_LFM2 = CallForm("<|tool_call_start|>[", "", "(", ")", ", ", "]<|tool_call_end|>", arguments=_PYTHON)
_ARG_KEYS = _items("<arg_key>", ("</arg_key>\n<arg_value>", "</arg_value>\n"))
_KIMI = ("<|tool_call_begin|>functions.", f":{COUNT}<|tool_call_argument_begin|>", "<|tool_call_end|>")
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
# A mark that a template has → the forms that its model writes, where no call of the history shows one.
# fmt: off
NAMED = {
    "<|channel|>commentary": HARMONY,
    "<|tool_call_start|>": (_LFM2,),
    "<|tool_list_start|>": (_LFM2,),
    "<|tool|>": (json_form("functools", listed=True),),
    "<|tool_call|>": (json_form("<|tool_call|>", listed=True, end="<|/tool_call|>"),),
    "<tool_call>": USUAL[:1],
    "<arg_key>": (CallForm("", "<tool_call>", "\n", "</tool_call>", "\n", arguments=_ARG_KEYS),),
    "<seed:tool_call>": (
        CallForm("", "<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>", "\n", arguments=_PARAMETERS),
    ),
    "<minimax:tool_call>": (CallForm(*_MINIMAX, arguments=_INVOKED),),
    "<｜DSML｜": tuple(_dsml(name) for name in ("function_calls", "tool_calls")),
    "<|tool_call_begin|>": (CallForm("<|tool_calls_section_begin|>", *_KIMI, end="<|tool_calls_section_end|>"),),
    "<｜tool▁calls▁begin｜>": (
        CallForm(*_DEEPSEEK[:4], "", _DEEPSEEK[4]),
        CallForm(
            _DEEPSEEK[0], f"{_DEEPSEEK[1]}function{_DEEPSEEK[2]}", "\n```json\n", f"\n```{_DEEPSEEK[3]}", "\n", _DEEPSEEK[4]
        ),
    ),
    "<TOOLCALL>": (json_form("<TOOLCALL>", listed=True, end="</TOOLCALL>"),),
    "<tool_calls>": (json_form("<tool_calls>", listed=True, end="</tool_calls>"),),
    "<|tools_prefix|>": (json_form("<|tools_prefix|>", listed=True, end="<|tools_suffix|>", keys=("", "")),),
    "<|START_ACTION|>": (json_form("<|START_ACTION|>", listed=True, end="<|END_ACTION|>", keys=("tool_name", "parameters")),),
    "<function_calls>": (CallForm("<function_calls>\n", "", "(", ")", "\n", "\n</function_calls>", arguments=_PYTHON),),
    "<|tool_call>": (CallForm("", "<|tool_call>call:", "", "<tool_call|>", arguments=Arguments("quoted", quote='<|"|>')),),
    "[TOOL_CALLS]": (
        json_form("[TOOL_CALLS]", listed=True),
        *(CallForm("", "[TOOL_CALLS]", named) for named in ("[ARGS]", f"[CALL_ID]{ID}[ARGS]", "")),
    ),
    "<|python_tag|>": (
        json_form("<|python_tag|>", keys=("name", "parameters")),
        CallForm("<|python_tag|>", "", ".call(", ")", several=False, arguments=_PYTHON),
    ),
}
# fmt: on
# What is read where neither a template nor a mark in it says more.
PUBLISHED = tuple({form: None for forms in (USUAL, *NAMED.values()) for form in forms})


def named_forms(template: str) -> list[CallForm]:
    """Forms for the marks that ``template`` has."""
    return [form for mark, forms in NAMED.items() if mark in template for form in forms]
