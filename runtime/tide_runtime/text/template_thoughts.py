"""How a model thinks aloud, as its chat template declares it: found by rendering made-up chats.

Templates declare it in one of five ways: they write the thoughts of an earlier turn with their marks; they end the prompt with an
opening mark, or with a block of no thoughts where a variable turns them off; they cut thoughts out of the content of an earlier
turn; or they tell the model, in words, which marks to write.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal

from jinja2 import Environment, meta, nodes

from tide_runtime.text.thoughts import TAG, ThoughtMarks

Render = Callable[..., str | None]
Field = Literal["reasoning_content", "reasoning", "parts"]

# Words that no template has: a prompt with one shows what was called so.
_USER, _THOUGHT, _ANSWER = "vreluth", "fimbulo", "quastiv"
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_USUAL_EFFORTS = ("low", "medium", "high")  # what a template that takes any value expects
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "unk_token", "pad_token"}
_OPENING_AT_END = re.compile(rf"({TAG.pattern})\s*$")
_CLOSING = re.compile(r"</[^<>\s/]+>|\[/[A-Z_]+\]")
_NAMED = re.compile(r"<([\w:]*(?:think|thought|reason)[\w:]*)>", re.IGNORECASE)
_EMPTY_PAIR = re.compile(r"<([\w:]+)></\1>")


@dataclass(frozen=True)
class TemplateThoughts:
    """What a template declares about thoughts.

    Args:
        marks: what stands around them; None: the model does not think aloud.
        field: of an assistant's message, from which the template takes its thoughts; "parts": they are a part of type
            ``thinking`` of its content; None: it leaves them out.
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
    def of(cls, template: str, environment: Environment, render: Render) -> TemplateThoughts:
        """Those of ``template``. ``render(messages, **variables)`` gives its text for them; None where it fails."""
        source = environment.parse(template)
        texts = [*_texts(source)]  # before jinja2.meta, which folds constants of the tree in place
        variables = frozenset(meta.find_undeclared_variables(source)) - _GIVEN - environment.globals.keys()
        found = cls(switch=_switch(variables, render), efforts=_efforts(variables, texts, render), variables=variables)
        prompts = _Prompts(render, found.switch)
        for field in ("reasoning_content", "reasoning", "parts"):
            if (marks := prompts.marks_of_history(field)) is not None:
                return replace(found, marks=marks, field=field)
        declared = prompts.marks_of_opening(texts) or prompts.marks_of_empty_block() or prompts.marks_of_cut(texts)
        return replace(found, marks=declared or prompts.marks_in_words())

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """``message`` with its thoughts where the template takes them; they are in ``reasoning_content`` or ``reasoning``."""
        names = ("reasoning_content", "thinking", "reasoning")
        thoughts = next((message[name] for name in names if message.get(name) is not None), None)
        if thoughts is None:
            return dict(message)
        if self.field == "parts":
            content = message.get("content") or []
            rest = [{"type": "text", "text": content}] if isinstance(content, str) else [*content]
            kept = {name: value for name, value in message.items() if name not in names}
            return {**kept, "content": [{"type": "thinking", "thinking": thoughts}, *rest]}
        # Under both names that templates use, as transformers does.
        extra = {"reasoning": thoughts} if self.field == "reasoning" else {}
        return {"thinking": thoughts, **message, "reasoning_content": thoughts, **extra}


class _Prompts:
    """Prompts of made-up chats with thoughts turned on, if they can be.

    ``open``: of a user's message; ``head``: what it has for the assistant's turn to come; ``off_head``: the same with thoughts
    turned off.
    """

    def __init__(self, render: Render, switch: str | None) -> None:
        on, off = ({switch: value} if switch is not None else {} for value in (True, False))
        self._user = {"role": "user", "content": _USER}
        self._render: Render = lambda messages, **extra: render(messages, **{**on, **extra})
        self.open, self.head = self._opened(on)
        _, self.off_head = self._opened(off)

    def _opened(self, variables: Mapping[str, Any]) -> tuple[str, str]:
        closed, opened = (self._render([self._user], **variables, add_generation_prompt=add) or "" for add in (False, True))
        return opened, opened[_shared(closed, opened) :]

    def marks_of_history(self, field: Field) -> ThoughtMarks | None:
        """Those around the thoughts of the last turn."""
        message = TemplateThoughts(field=field).message({"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT})
        if field == "reasoning":
            message = {"role": "assistant", "content": _ANSWER, "reasoning": _THOUGHT}
        text = self._render([self._user, message], add_generation_prompt=False) or ""
        begin, answer = text.find(_THOUGHT), text.find(_ANSWER)
        if not 0 <= begin < answer:
            return None
        before = text[_shared(text, self.open) : begin]
        opening = before.strip() or _opening_at_end(self.open) or self.open.rstrip().rpartition("\n")[2]
        between = text[begin + len(_THOUGHT) : answer]
        closing = TAG.search(between)
        if not opening or closing is None:
            return None
        return ThoughtMarks(opening, closing[0], lead=between[: closing.start()], gap=between[closing.end() :])

    def marks_of_opening(self, texts: list[str]) -> ThoughtMarks | None:
        """Those of a prompt that ends with an opening, whose closing the template has."""
        opening = _opening_at_end(self.head)
        closing = opening[:1] + "/" + opening[1:]
        if not opening or not any(closing in text for text in texts):
            return None
        return ThoughtMarks(opening, closing, lead=self.head[self.head.rindex(opening) + len(opening) :])

    def marks_of_empty_block(self) -> ThoughtMarks | None:
        """Those of the block that ends the prompt where thoughts are turned off."""
        block = self.off_head[_shared(self.head, self.off_head) :]
        tags = [*TAG.finditer(block)]
        if len(tags) < 2 or not self.off_head.startswith(self.head.rstrip()):
            return None
        opening = block[: tags[-1].start()].strip()
        return ThoughtMarks(opening, tags[-1][0], gap=block[tags[-1].end() :])

    def marks_of_cut(self, texts: list[str]) -> ThoughtMarks | None:
        """Those up to whose closing the template cuts off the content of an earlier turn."""
        for closing in dict.fromkeys(closing for text in texts for closing in _CLOSING.findall(text)):
            answer = {"role": "assistant", "content": f"{_THOUGHT}{closing}{_ANSWER}"}
            text = self._render([self._user, answer, self._user], add_generation_prompt=False) or ""
            if _ANSWER in text and _THOUGHT not in text:
                return ThoughtMarks(closing.replace("/", "", 1), closing)
        return None

    def marks_in_words(self) -> ThoughtMarks | None:
        """Those that the prompt itself tells the model to write, perhaps with a pair around the answer."""
        for name in _NAMED.findall(self.open):
            _, _, rest = self.open.partition(f"<{name}>")
            _, found, rest = rest.partition(f"</{name}>")
            if found:
                pair = _EMPTY_PAIR.search(rest)
                gap, ending = (f"\n<{pair[1]}>", f"</{pair[1]}>") if pair is not None else ("", "")
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


def _shared(one: str, other: str) -> int:
    """Length of the text that both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _opening_at_end(prompt: str) -> str:
    found = _OPENING_AT_END.search(prompt)
    return found[1] if found is not None else ""
