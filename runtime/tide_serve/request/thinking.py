"""What a request says of thoughts: whether the model thinks, how hard, for how many tokens, and how its template is told so.

``reasoning_effort``, ``chat_template_kwargs`` and ``reasoning`` ({enabled, effort, max_tokens}) set variables of the model's chat
template, where that has such variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tide_runtime import Engine
from tide_runtime.text.chat_template import analysed
from tide_runtime.text.template_thoughts import TemplateThoughts
from tide_runtime.text.thoughts import ThoughtMarks, Thoughts, ThoughtSplitter

from tide_serve.errors import ApiError
from tide_serve.observe.request_record import note_no_effect

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # those of OpenAI's and Anthropic's APIs, in order
_SWITCH = "enable_thinking"  # the name by which a request sets a template's switch, whatever that is called


@dataclass(frozen=True)
class ThoughtPlan:
    """How a request's answers think.

    Args:
        thoughts: their marks and budget; None: there are none.
        marks: those of the model, also where it has no thoughts here.
        variables: of the template.
        special: marks that are special tokens.
        ends_answers: the mark after an answer ends the output; otherwise calls may follow it.
    """

    thoughts: Thoughts | None = None
    marks: ThoughtMarks | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    special: tuple[str, ...] = ()
    ends_answers: bool = True

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the output: the mark after an answer."""
        return self.endings if self.ends_answers else ()

    @property
    def endings(self) -> tuple[str, ...]:
        """The mark after an answer, which belongs to no text."""
        return (self.marks.ending,) if self.marks is not None and self.marks.ending else ()

    def splitter(self) -> ThoughtSplitter | None:
        """What finds the thoughts of one output."""
        return ThoughtSplitter(self.thoughts.marks, self.thoughts.begun) if self.thoughts is not None else None

    def after(self, prompt: str) -> ThoughtPlan:
        """The plan for outputs that follow ``prompt``, which may have opened the thoughts, or closed them."""
        if self.thoughts is None:
            return self
        end = prompt.rstrip()
        marks = self.thoughts.marks
        if end.endswith(marks.closing):
            return replace(self, thoughts=None)
        return replace(self, thoughts=replace(self.thoughts, begun=end.endswith(marks.opening)))


def plan_thoughts(body: Mapping[str, Any], engine: Engine, uses_tools: bool) -> ThoughtPlan:
    """The plan of a request. What the model's template has no variable for has no effect, which the log says.

    Raises ApiError with the field's name where two fields contradict each other.
    """
    template = (engine.tool_chat_template if uses_tools else engine.chat_template) or ""
    declared = analysed(template).thoughts if template else TemplateThoughts()
    reasoning = {name: value for name, value in body.get("reasoning", {}).items() if value is not None}
    budget = reasoning.get("max_tokens")
    if budget is not None and budget < 1:
        raise ApiError(400, f"reasoning.max_tokens is {budget}; set it to at least 1 token", "reasoning.max_tokens")
    variables = _Variables(declared)
    if "enabled" in reasoning or budget is not None:
        name = "reasoning.enabled" if "enabled" in reasoning else "reasoning.max_tokens"
        variables.turn(reasoning.get("enabled", True), name)
    for name, effort in (("reasoning_effort", body.get("reasoning_effort")), ("reasoning.effort", reasoning.get("effort"))):
        if effort is not None:
            variables.set_effort(effort, name)
    for name, value in body.get("chat_template_kwargs", {}).items():
        variables.set_named(name, value)
    thoughts = Thoughts(declared.marks, budget=budget) if declared.marks is not None else None
    vocabulary = engine.admission.thoughts
    special = vocabulary.special(thoughts.marks) if thoughts is not None and vocabulary is not None else {}
    return ThoughtPlan(thoughts, declared.marks, variables.values, tuple(special.values()), ends_answers=not uses_tools)


class _Variables:
    """Values of a template's variables, as fields of a request set them."""

    def __init__(self, declared: TemplateThoughts) -> None:
        self._declared = declared
        self.values: dict[str, Any] = {}

    def turn(self, on: bool, name: str) -> None:
        """Turn thoughts on or off. A model without a switch thinks always, or never."""
        declared = self._declared
        if declared.switch is not None:
            self._set(declared.switch, on, name)
        elif not on and (off := [effort for effort in ("none", "no_think") if effort in declared.efforts]):
            self._set("reasoning_effort", off[0], name)
        elif on != (declared.marks is not None):
            note_no_effect(name)

    def set_effort(self, effort: str, name: str) -> None:
        """Set the effort; of those that the template does not take, the nearest that it takes. Raises ApiError for a word of no
        API."""
        efforts = self._declared.efforts
        nearest = [each for each in _EFFORTS if each in efforts and each != "none"]
        if effort in efforts:
            self._set("reasoning_effort", effort, name)
        elif effort == "none":
            self.turn(False, name)
        elif nearest and effort in _EFFORTS:
            wanted = _EFFORTS.index(effort)
            self._set("reasoning_effort", min(nearest, key=lambda each: abs(_EFFORTS.index(each) - wanted)), name)
        elif efforts:
            raise ApiError(400, f"{name} is {effort!r:.40}; the model's chat template takes {', '.join(efforts)}", name)
        else:
            note_no_effect(name)

    def set_named(self, name: str, value: Any) -> None:
        declared = self._declared
        at = f"chat_template_kwargs.{name:.40}"
        if name == _SWITCH and declared.switch is not None:
            name = declared.switch
        if name in declared.variables:
            self._set(name, value, at)
        else:
            note_no_effect(at)

    def _set(self, variable: str, value: Any, name: str) -> None:
        if variable in self.values and self.values[variable] != value:
            raise ApiError(400, f"{name} contradicts another field, which sets {variable} differently; give one of them", name)
        self.values[variable] = value
