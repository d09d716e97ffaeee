"""The form in which a model writes calls of tools, and forms of published models whose templates do not show it.

An output has ``begin``, then calls with ``sep`` between them, then ``end``. A call is ``open``, the name, ``named``, the
arguments and ``close``. All are literals in which white space is free; `ID` and the like stand for what changes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from uuid import uuid4

from tide_serve.request.call_arguments import Arguments, Items, Json, Literals, Value
from tide_serve.request.call_reader import COUNT, ID, NAME, NoCall, Reading, Unfinished, pieces
from tide_serve.request.call_values import as_object, dumped

_MARK = re.compile(r"<|\[[A-Z]")
_SEPARATORS = re.compile(r"[\s;,]*")
_NAME_KEYS = {"name", "id", "type", "index", "tool_call_id"}  # an object with other keys and no arguments is data


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
class JsonCall:
    """A call that is one JSON value, or one of the list of calls that is one.

    Args:
        head, tail: of the value, before the name and behind the arguments; ``open`` ends and ``close`` begins with them.
        name, arguments: keys; no name: the name is the key of the arguments.
        listed: ``begin`` ends with the bracket of the list.
    """

    head: str = '{"name": "'
    tail: str = "}"
    name: str = "name"
    arguments: str = "arguments"
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
    arguments: Arguments = field(default_factory=Json)
    as_json: JsonCall | None = None

    @property
    def literals(self) -> str:
        """All text that is the form's."""
        return "\n".join([self.begin, self.open, self.named, self.close, self.sep, self.end, *self.arguments.marks])

    @property
    def is_list(self) -> bool:
        """Whether all calls are one JSON value."""
        return self.as_json is not None and self.as_json.listed

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
        return self.begin.rstrip().removesuffix("[") if self.is_list else self.begin + self.call_open

    @cached_property
    def behind(self) -> tuple[str, ...]:
        """Pieces that may stand behind a call and are no text."""
        end = self.end.lstrip().removeprefix("]") if self.is_list else self.end
        return tuple(piece for piece in pieces(f"{self.call_close}\n{self.sep}\n{end}") if piece not in (ID, COUNT, NAME))

    @cached_property
    def openings(self) -> tuple[tuple[str, str], ...]:
        """(phrase, lead): calls may begin with a ``phrase``, of a ``lead`` whose first marks a model may leave out."""
        leads = []
        rest = self.lead
        for piece in pieces(self.lead):
            rest = rest[rest.index(piece) :]
            if _MARK.match(piece) or (rest == self.lead.lstrip() and piece[0] not in "[({`"):
                leads.append(rest)
            rest = rest[len(piece) :]
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

    def read(self, reading: Reading) -> list[ToolCall]:
        """The call behind ``open``, or those of the JSON value there; moves past ``close`` too.

        Raises `Unfinished` where more text may make it a call, and `NoCall` where none can.
        """
        calls = [self._call(reading)] if self.as_json is None else _json_calls(self.as_json, reading)
        close = pieces(self.call_close)
        if close and not reading.closes(close[0]) and not reading.sees(self.call_open):
            raise NoCall
        return calls

    def _call(self, reading: Reading) -> ToolCall:
        name = reading.tool()
        close = next(iter(pieces(self.close or self.end)), "")
        if reading.consumes(self.named):
            return _call_of(name, self.arguments.read(reading, reading.tools[name], close), reading)
        if isinstance(self.arguments, Items) and reading.sees(close):
            return ToolCall(name, "{}")
        raise NoCall


def _call_of(name: Any, arguments: Any, reading: Reading) -> ToolCall:
    """A call of tool ``name``; one that takes no arguments gets none, whatever a model makes up."""
    if not isinstance(name, str) or name not in reading.tools:
        raise NoCall
    schema = reading.tools[name]
    given = as_object(arguments)
    takes_none = schema.get("additionalProperties") is False and not schema.get("properties")
    return ToolCall(name, "{}" if takes_none else dumped(given))


def _json_calls(keys: JsonCall, reading: Reading) -> list[ToolCall]:
    """The calls of a list of objects, or of objects one after the other."""
    value = reading.json()
    if isinstance(value, list):
        return [call for each in value for call in _calls_of(each, keys, reading)]
    calls = _calls_of(value, keys, reading)
    while True:
        begin = _SEPARATORS.match(reading.text, reading.at).end()  # type: ignore[union-attr]
        if begin == len(reading.text) and not reading.ended:
            raise Unfinished
        if not reading.text.startswith("{", begin):
            return calls
        reading.at = begin
        calls += _calls_of(reading.json(), keys, reading)


def _calls_of(value: Any, keys: JsonCall, reading: Reading) -> list[ToolCall]:
    if not isinstance(value, dict):
        raise NoCall
    if not keys.name and all(name in reading.tools for name in value):
        return [_call_of(name, arguments, reading) for name, arguments in value.items()]
    if keys.name in value and keys.name != "name":
        value = {"name": value[keys.name], "arguments": value.get(keys.arguments)}
    elif "name" not in value:  # {"type": "function", "function": …} with an object or a name
        value = value["function"] if isinstance(value.get("function"), dict) else {"name": value.get("function"), **value}
    given = [value[key] for key in (keys.arguments, "arguments", "parameters") if key in value]
    if not given and not value.keys() <= _NAME_KEYS:
        raise NoCall
    return [_call_of(value.get("name"), given[0] if given else None, reading)]


# --- forms of published models


def json_form(
    begin: str = "", close: str = "", *, listed: bool = False, end: str = "", keys: tuple[str, str] = ("name", "arguments")
) -> CallForm:
    """Calls in JSON with ``begin`` before each, or before the list of them."""
    name, arguments = keys
    call = JsonCall(f'{{"{name}": "' if name else '{"', name=name, arguments=arguments, listed=listed)
    named = f'", "{arguments}": ' if name else '": '
    if listed:
        return CallForm(f"{begin}[", call.head, named, call.tail, ", ", f"]{end}", as_json=call)
    several = bool(close)
    return CallForm("", begin + call.head, named, call.tail + close, "\n" if several else "", several=several, as_json=call)


def _items(key_open: str, before: str, after: str) -> Items:
    return Items(key_open, (Value(before, after),))


HERMES = json_form("<tool_call>\n", "\n</tool_call>")
_PARAMETERS = _items("<parameter=", ">\n", "\n</parameter>\n")
# Any model may write these: Hermes' JSON, and Qwen3-Coder's and Llama 3's functions.
USUAL = (
    HERMES,
    CallForm("", "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "\n", arguments=_PARAMETERS),
    CallForm("", "<function=", ">", "</function>"),
)
# Without a mark: the whole output, so any model may write them too.
BARE = (json_form(), json_form("```json\n", "\n```"), CallForm("[", "", "(", ")", ", ", "]", arguments=Literals()))
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
_LFM2 = CallForm("<|tool_call_start|>[", "", "(", ")", ", ", "]<|tool_call_end|>", arguments=Literals())
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_KIMI = ("<|tool_call_begin|>functions.", f":{COUNT}<|tool_call_argument_begin|>", "<|tool_call_end|>")
_TYPED = Items(  # DeepSeek V3.2 and V4
    '<｜DSML｜parameter name="',
    (
        Value('" string="true">', "</｜DSML｜parameter>\n", ("string",)),
        Value('" string="false">', "</｜DSML｜parameter>\n", ("integer", "number", "boolean", "null", "object", "array")),
    ),
)
# A mark that a template has → the forms that its model writes, where the history shows no calls, or others.
# fmt: off
NAMED = {
    "<|channel|>commentary": HARMONY,
    "<|tool_call_start|>": (_LFM2,),
    "<|tool_list_start|>": (_LFM2,),
    "<|tool|>": (json_form("functools", listed=True),),
    "<|tool_call|>": (json_form("<|tool_call|>", listed=True, end="<|/tool_call|>"),),
    "<tool_call>": USUAL[:1],
    "<arg_key>": (
        CallForm("", "<tool_call>", "\n", "</tool_call>", "\n",
                 arguments=_items("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")),
    ),
    "<seed:tool_call>": (
        CallForm("", "<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>", "\n", arguments=_PARAMETERS),
    ),
    "<minimax:tool_call>": (
        CallForm("<minimax:tool_call>\n", '<invoke name="', '">\n', "</invoke>\n", "", "</minimax:tool_call>",
                 arguments=_items('<parameter name="', '">', "</parameter>\n")),
    ),
    "<｜DSML｜": tuple(
        CallForm(f"<｜DSML｜{section}>\n", '<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n", "", f"</｜DSML｜{section}>",
                 arguments=_TYPED)
        for section in ("function_calls", "tool_calls")
    ),
    "<|tool_call_begin|>": (CallForm("<|tool_calls_section_begin|>", *_KIMI, end="<|tool_calls_section_end|>"),),
    "<｜tool▁calls▁begin｜>": (
        CallForm(*_DEEPSEEK[:4], "", _DEEPSEEK[4]),
        CallForm(_DEEPSEEK[0], "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>", "\n",
                 _DEEPSEEK[4]),
    ),
    "<TOOLCALL>": (json_form("<TOOLCALL>", listed=True, end="</TOOLCALL>"),),
    "<tool_calls>": (json_form("<tool_calls>", listed=True, end="</tool_calls>"),),
    "<|tools_prefix|>": (json_form("<|tools_prefix|>", listed=True, end="<|tools_suffix|>", keys=("", "")),),
    "<|START_ACTION|>": (json_form("<|START_ACTION|>", listed=True, end="<|END_ACTION|>", keys=("tool_name", "parameters")),),
    "<function_calls>": (CallForm("<function_calls>\n", "", "(", ")", "\n", "\n</function_calls>", arguments=Literals()),),
    "<|tool_call>": (CallForm("", "<|tool_call>call:", "", "<tool_call|>", arguments=Literals('<|"|>')),),
    "[TOOL_CALLS]": (
        json_form("[TOOL_CALLS]", listed=True),
        *(CallForm("", "[TOOL_CALLS]", named) for named in ("[ARGS]", f"[CALL_ID]{ID}[ARGS]", "")),
    ),
    "<|python_tag|>": (
        json_form("<|python_tag|>", keys=("name", "parameters")),
        CallForm("<|python_tag|>", "", ".call(", ")", several=False, arguments=Literals()),
    ),
}
# fmt: on
# What is read where neither a template nor a mark in it says more.
PUBLISHED = tuple(dict.fromkeys(form for forms in (USUAL, *NAMED.values()) for form in forms))


def named_forms(template: str) -> list[CallForm]:
    """Forms for the marks that ``template`` has."""
    return [form for mark, forms in NAMED.items() if mark in template for form in forms]
