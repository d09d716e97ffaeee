"""How a model thinks aloud, as its chat template declares it: found by rendering made-up chats.

Templates declare it in one of five ways: they write the thoughts of an earlier turn with their marks; they end the prompt with an
opening mark, or with a block of no thoughts where a variable turns them off; they cut thoughts out of the content of an earlier
turn; or they tell the model, in words, which marks to write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal, get_args

from jinja2 import Environment, meta, nodes

from tide_runtime.text.message_parts import joined_parts
from tide_runtime.text.prefix_match import common_prefix_length
from tide_runtime.text.template_forms import TemplateForms
from tide_runtime.text.thoughts import TAG, ThoughtMarks

Render = Callable[..., str | None]
Field = Literal["reasoning_content", "reasoning", "tool_plan", "parts", "blocks"]

# Words that no template has: a prompt with one shows what was called so.
_USER, _THOUGHT, _ANSWER = "vreluth", "fimbulo", "quastiv"
_EFFORTS = ("none", "no_think", "minimal", "low", "medium", "high", "xhigh", "max")
_USUAL_EFFORTS = ("low", "medium", "high")  # tried on a template that accepts any value
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token"}
_USUAL_GAP = "\n\n"  # assumed where the template does not show the gap
_OPENING_AT_END = re.compile(rf"((?:(?:{TAG.pattern})\w+)?(?:{TAG.pattern}))\s*$")
_CLOSING = re.compile(r"</[^<>\s/]+>|\[/[A-Z_]+\]")
_NAMED = re.compile(r"<([\w:]*(?:think|thought|reason)[\w:]*)>", re.IGNORECASE)
_EMPTY_PAIR = re.compile(r"<([\w:]+)></\1>")


@dataclass(frozen=True)
class TemplateThoughts:
    """What a template declares about thoughts.

    Args:
        marks: what stands around them; None: the model does not think aloud.
        field: of an assistant's message, from which the template takes its thoughts; "parts": they are a part of type
            ``thinking`` of its content; "blocks": one of type ``thoughts`` of its blocks; None: it leaves them out.
        switch: the variable that turns thoughts on and off; None: there is none.
        efforts: values that the variable ``reasoning_effort`` may have.
        variables: names of all variables that a request may set.
    """

    marks: ThoughtMarks | None = None
    field: Field | None = None
    switch: str | None = None
    efforts: tuple[str, ...] = ()
    variables: frozenset[str] = frozenset()

    @classmethod
    def of(cls, template: str, environment: Environment, render: Render, forms: TemplateForms) -> TemplateThoughts:
        """Those of ``template``. ``render(messages, **variables)`` gives its text for them; None where it fails."""
        source = environment.parse(template)
        texts = [*_texts(source)]  # before jinja2.meta, which folds constants of the tree in place
        variables = frozenset(meta.find_undeclared_variables(source)) - _GIVEN - environment.globals.keys()
        found = cls(switch=_switch(variables, render), efforts=_efforts(variables, texts, render), variables=variables)
        prompts = _Prompts(render, found.switch, forms)
        for of_history, field in product((prompts.marks_of_history, prompts.marks_before_calls), get_args(Field)):
            if (marks := of_history(field)) is not None:
                return replace(found, marks=marks, field=field)
        declared = prompts.marks_of_opening(texts) or prompts.marks_of_empty_block() or prompts.marks_of_cut(texts)
        return replace(found, marks=declared or prompts.marks_in_words())

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """``message`` with its thoughts where the template takes them; they are in ``reasoning_content`` or ``reasoning``."""
        names = ("reasoning_content", "thinking", "reasoning")
        thoughts = next((message[name] for name in names if message.get(name) is not None), None)
        kept = {name: value for name, value in message.items() if name not in names}
        content = message.get("content") or []
        if self.field == "blocks" and message["role"] == "assistant":  # all of them: the template takes one kind in a chat
            blocks = [("thoughts", thoughts), ("response", joined_parts(content))]
            return {**kept, "content": {"blocks": [{"type": kind, "text": text} for kind, text in blocks if text]}}
        if thoughts is None:
            return dict(message)
        if self.field == "parts":
            rest = [{"type": "text", "text": content}] if isinstance(content, str) else [*content]
            return {**kept, "content": [{"type": "thinking", "thinking": thoughts}, *rest]}
        # Under both names that templates use, as transformers does.
        return {"thinking": thoughts, **message, "reasoning_content": thoughts, self.field or "reasoning_content": thoughts}


class _Prompts:
    """Prompts of made-up chats with thoughts turned on, if they can be.

    ``open``: of a user's message; ``head``: what it has for the assistant's turn to come; ``off_head``: the same with thoughts
    turned off.
    """

    def __init__(self, render: Render, switch: str | None, forms: TemplateForms) -> None:
        on, off = ({switch: value} if switch is not None else {} for value in (True, False))
        self._user = forms.message({"role": "user", "content": _USER})
        self._forms = forms
        self._render: Render = lambda messages, **extra: render(messages, **{**on, **extra})
        self.open, self.head = self._opened(on)
        _, self.off_head = self._opened(off)

    def _opened(self, variables: Mapping[str, Any]) -> tuple[str, str]:
        closed, opened = (self._render([self._user], **variables, add_generation_prompt=add) or "" for add in (False, True))
        return opened, opened[common_prefix_length(closed, opened) :]

    def marks_of_history(self, field: Field) -> ThoughtMarks | None:
        """Those around the thoughts of the last turn."""
        text = self._turn({"content": _ANSWER}, field)
        begin, answer = text.find(_THOUGHT), text.find(_ANSWER)
        if not 0 <= begin < answer:
            return None
        before = text[common_prefix_length(text, self.open) : begin]
        between = text[begin + len(_THOUGHT) : answer]
        opening = before.strip() or _opening_at_end(self.open) or self.open.rstrip().rpartition("\n")[2]
        if between.lstrip().startswith(opening):  # the prompt ends with no thoughts
            opening = _opening_at_end(text[:begin])
        closing = _closing_of(opening, between)
        if not opening or closing is None:
            return None
        gap = between[closing.end() :]
        return self._with_ending(ThoughtMarks(opening, closing[0], lead=between[: closing.start()], gap=gap))

    def marks_before_calls(self, field: Field) -> ThoughtMarks | None:
        """Those around the thoughts of a message with a call, which some templates show only there."""
        if not self._forms.shows_calls:
            return None
        call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": _ANSWER, "arguments": {_ANSWER: _ANSWER}}}
        text = self._turn({"content": None, "tool_calls": [call]}, field)
        _, found, behind = text.partition(_THOUGHT)
        opening = _opening_at_end(text[common_prefix_length(text, self.open) : text.find(_THOUGHT)]) if found else ""
        closing = _closing_of(opening, behind) if opening else None
        if closing is None:
            return None
        marks = ThoughtMarks(opening, closing[0], lead=behind[: closing.start()], gap=self._gap(closing[0]))
        return self._with_ending(marks)

    def _turn(self, fields: Mapping[str, Any], field: Field | None = None) -> str:
        """The text of a chat whose last message, the assistant's, has ``fields``, and thoughts in ``field``."""
        message = self._forms.message({"role": "assistant", **fields})
        if field in ("reasoning", "tool_plan"):
            message[field] = _THOUGHT
        elif field is not None:
            message = TemplateThoughts(field=field).message({**message, "reasoning_content": _THOUGHT})
        return self._render([self._user, message], add_generation_prompt=False) or ""

    def _gap(self, closing: str) -> str:
        """What the template has between ``closing`` and an answer, as an answer without thoughts shows it."""
        before = self._turn({"content": _ANSWER}).partition(_ANSWER)[0]
        head = before[common_prefix_length(before, self.open) :]
        behind_user = before.rpartition(_USER)[2]
        if closing in behind_user:
            return behind_user.rpartition(closing)[2]
        return head if TAG.fullmatch(head.strip()) else _USUAL_GAP

    def _with_ending(self, marks: ThoughtMarks) -> ThoughtMarks:
        """``marks`` with the one that ends an answer as its head begins it."""
        behind = self._turn({"content": _ANSWER}).partition(_ANSWER)[2]
        ending = _closing_of(marks.answer_head, behind) if marks.answer_head else None
        return replace(marks, ending=ending[0]) if ending is not None and ending["name"] is not None else marks

    def marks_of_opening(self, texts: list[str]) -> ThoughtMarks | None:
        """Those of a prompt that ends with an opening, whose closing the template has."""
        opening = _opening_at_end(self.head)
        closing = opening[:1] + "/" + opening[1:]
        if not opening or not any(closing in text for text in texts):
            return None
        lead = self.head[self.head.rindex(opening) + len(opening) :]
        return ThoughtMarks(opening, closing, lead=lead, gap=self._gap(closing))

    def marks_of_empty_block(self) -> ThoughtMarks | None:
        """Those of the block that ends the prompt where thoughts are turned off."""
        block = self.off_head[common_prefix_length(self.head, self.off_head) :]
        tags = [*TAG.finditer(block)]
        if len(tags) < 2 or not self.off_head.startswith(self.head.rstrip()):
            return None
        opening = block[: tags[-1].start()].strip()
        return ThoughtMarks(opening, tags[-1][0], gap=block[tags[-1].end() :])

    def marks_of_cut(self, texts: list[str]) -> ThoughtMarks | None:
        """Those up to whose closing the template cuts off the content of an earlier turn."""
        for closing in dict.fromkeys(closing for text in texts for closing in _CLOSING.findall(text)):
            answer = self._forms.message({"role": "assistant", "content": f"{_THOUGHT}{closing}{_ANSWER}"})
            text = self._render([self._user, answer, self._user], add_generation_prompt=False) or ""
            if _ANSWER in text and _THOUGHT not in text:
                return ThoughtMarks(closing.replace("/", "", 1), closing, gap=self._gap(closing))
        return None

    def marks_in_words(self) -> ThoughtMarks | None:
        """Those that the prompt itself tells the model to write, perhaps with a pair around the answer."""
        for name in _NAMED.findall(self.open):
            _, _, rest = self.open.partition(f"<{name}>")
            _, found, rest = rest.partition(f"</{name}>")
            if found:
                pair = _EMPTY_PAIR.search(rest)
                gap, ending = (f"\n<{pair[1]}>", f"</{pair[1]}>") if pair is not None else (_USUAL_GAP, "")
                return ThoughtMarks(f"<{name}>", f"</{name}>", gap=gap, ending=ending)
        return None


def _texts(source: nodes.Template) -> Iterator[str]:
    """All text in a template, of its code too."""
    yield from (data.data for data in source.find_all(nodes.TemplateData))
    yield from (constant.value for constant in source.find_all(nodes.Const) if isinstance(constant.value, str))


def _switch(variables: frozenset[str], render: Render) -> str | None:
    """The variable, named after thinking, whose values true and false give different prompts."""
    names = sorted(name for name in variables if re.search("think|reason", name) and not re.search("budget|effort", name))
    user = [{"role": "user", "content": _USER}]
    for name in names:
        on, off = (render(user, add_generation_prompt=True, **{name: value}) for value in (True, False))
        if on is not None and off is not None and on != off:
            return name
    return None


def _efforts(variables: frozenset[str], texts: list[str], render: Render) -> tuple[str, ...]:
    if "reasoning_effort" not in variables:
        return ()
    named = tuple(effort for effort in _EFFORTS if effort in texts)
    user = [{"role": "user", "content": _USER}]
    candidates = named if len(named) > 1 else _USUAL_EFFORTS
    return tuple(effort for effort in candidates if render(user, reasoning_effort=effort, add_generation_prompt=True) is not None)


def _closing_of(opening: str, text: str) -> re.Match[str] | None:
    """The first tag in ``text``, and its ``name``: what follows the first tag of ``opening``, where it follows this one too."""
    name = re.escape(TAG.sub("", opening, count=1))
    return re.search(rf"(?:{TAG.pattern})(?P<name>{name})?", text)


def _opening_at_end(prompt: str) -> str:
    found = _OPENING_AT_END.search(prompt)
    return found[1] if found is not None else ""
