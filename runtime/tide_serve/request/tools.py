"""Tools of a request: what the model is told about them, and the grammar of its calls.

A chat template that takes ``tools`` shows them in the form that its model was trained on, and the form of calls is learned from
it (`tide_serve.request.call_learning`). For other models a system message describes them; calls and results of earlier turns
that a template does not show become text of the same form, mostly that of Hermes and SmolLM2:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

``tool_choice`` "required" or a named function, and ``strict`` tools, make the output follow a grammar, so that calls always
parse. With "auto" and tools that are not strict, calls are found in the text (see `tide_serve.request.tool_calls`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tide_runtime import Engine, Grammar
from tide_runtime.errors import PromptError
from tide_runtime.text.chat_template import analysed
from tide_runtime.text.tokenizer import Tokenizer

from tide_serve.config import ServeConfig
from tide_serve.errors import ApiError
from tide_serve.request.call_arguments import parameters_of, styled
from tide_serve.request.call_formats import HARMONY, PUBLISHED, USUAL, CallForm, named_forms
from tide_serve.request.call_grammar import CallGrammar
from tide_serve.request.call_learning import learned_form
from tide_serve.request.structured import check_schema
from tide_serve.request.tool_calls import ToolCallParser
from tide_serve.request.tool_results import functions_of

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MARK = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class ToolPlan:
    """What a request allows the model to call.

    Args:
        tools: the definitions, as the chat template takes them; empty: no calls.
        required: the answer is calls and nothing else.
        parallel: it may have several.
        shown, calls_shown: the model's template shows tools, and calls of earlier turns; otherwise they become text.
        forms: in which calls are found; forced calls have the first.
        tokens: mark of the forms → its id, where it is one token, as llguidance does not match such tokens as text.
        special: id → mark of calls that is a special token; the text of the output has it, unlike others.
        ends: ids that end an output.
    """

    tools: tuple[dict[str, Any], ...] = ()
    required: bool = False
    parallel: bool = True
    shown: bool = False
    calls_shown: bool = False
    forms: tuple[CallForm, ...] = USUAL
    tokens: Mapping[str, int] = field(default_factory=dict)
    special: Mapping[int, str] = field(default_factory=dict)
    ends: Collection[int] = ()

    def parser(self) -> ToolCallParser | None:
        """The reader of calls for one output; None: all of it is text."""
        return ToolCallParser(self._schemas, self.special.values(), self._max_calls, self.forms) if self.tools else None

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the output: after the first call where there may be no other, and no grammar ends it.

        With the line break, which no JSON string has, a tag in an argument ends nothing.
        """
        close = self.forms[0].call_close.rstrip()
        ends = self.tools and not self.parallel and not self._follows_grammar
        return (close,) if ends and self.forms[0].as_json is not None and close.startswith("\n") else ()

    @property
    def _schemas(self) -> dict[str, Mapping[str, Any]]:
        return {tool["function"]["name"]: parameters_of(tool["function"]) for tool in self.tools}

    @property
    def _max_calls(self) -> int | None:
        return None if self.parallel else 1

    @property
    def _follows_grammar(self) -> bool:
        return self.required or any(tool["function"].get("strict") for tool in self.tools)

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """The grammar of the whole output, where ``answer`` is that of its text. Raises ApiError where they do not combine."""
        if not self.tools or (not self._follows_grammar and answer is None):
            return answer
        form = self.forms[0]
        calls = CallGrammar(form, [tool["function"] for tool in self.tools], self._token)
        rules = [*calls.rules(self.parallel)]
        if self.required:
            rules.append("start: calls")
        elif answer is not None:
            if answer.kind != "json_schema":
                message = "response_format: a regex or Lark grammar cannot be combined with tools; use a JSON schema"
                raise ApiError(400, message, "response_format")
            rules += ["start: calls | answer", f"answer: %json {styled(json.loads(answer.source))}"]
        else:
            rules += calls.free(self.parallel)
        return Grammar.lark("\n".join(rules))

    def _token(self, mark: str) -> str | None:
        token = self.tokens.get(mark)
        if token is None:
            return None
        return "" if token in self.ends else f"<[{token}]>"


def plan_tools(body: Mapping[str, Any], engine: Engine, config: ServeConfig) -> ToolPlan:
    """The plan of a request with the fields ``tools``, ``tool_choice`` and ``parallel_tool_calls``.

    Tools that are not functions are left out. Raises ApiError for a choice that the tools do not allow.
    """
    for index, tool in enumerate(body.get("tools", [])):
        if tool["type"] == "function":
            _check_tool(tool, f"tools[{index}]", config)
    tools = functions_of(body.get("tools", []))
    names = [tool["function"]["name"] for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ApiError(400, f"tools has {min(twice)!r} more than once; give each tool a name of its own", "tools")
    mode, allowed = _choice(body.get("tool_choice", "auto"), names)
    uses_tools = bool(tools) and mode != "none"
    template = (engine.tool_chat_template if uses_tools else engine.chat_template) or ""
    shown = analysed(template).forms
    forms = call_forms(template)
    if not uses_tools:
        return ToolPlan(calls_shown=shown.shows_calls, shown=shown.takes_tools, forms=forms)
    marks = {mark for form in forms for mark in _MARK.findall(form.literals)}
    return ToolPlan(
        tools=tuple(tool for tool in tools if tool["function"]["name"] in allowed),
        required=mode != "auto",
        parallel=mode != "named" and body.get("parallel_tool_calls", True),
        shown=shown.takes_tools,
        calls_shown=shown.shows_calls,
        forms=forms,
        tokens=_tokens(engine.tokenizer, marks),
        special=_special_tags(engine.tokenizer, "\n".join(form.literals for form in forms)),
        ends=engine.manifest.generation.eos_token_ids,
    )


def call_forms(template: str) -> tuple[CallForm, ...]:
    """The forms in which the model of ``template`` writes calls, the one for forced calls first."""
    learned = learned_form(template).form
    named = named_forms(template)
    if learned is None:
        return tuple(dict.fromkeys((*(named if analysed(template).forms.takes_tools else ()), *PUBLISHED)))
    return tuple(dict.fromkeys((*named, learned, *USUAL) if HARMONY[0] in named else (learned, *named, *USUAL)))


def described_calls(engine: Engine) -> dict[str, str]:
    """What /v1/models and the log say about the calls of a model: how it writes one, and what its template left open."""
    template = engine.tool_chat_template
    if not template:
        return {}
    try:
        forms = call_forms(template)
        learned = learned_form(template)
    except PromptError as error:
        return {"tool_calls_note": str(error)}
    usual = "the form of calls is not learned from the chat template, but a usual one: " if learned.form is None else ""
    note = {"tool_calls_note": usual + learned.flaw} if learned.flaw else {}
    return {"tool_calls": forms[0].text([("FUNCTION", {"ARGUMENT": "VALUE"})]), **note}


def _tokens(tokenizer: Tokenizer | None, marks: Collection[str]) -> dict[str, int]:
    ids = {mark: tokenizer.encode(mark, add_special_tokens=False) for mark in marks} if tokenizer is not None else {}
    return {mark: tokens[0] for mark, tokens in ids.items() if len(tokens) == 1}


def _special_tags(tokenizer: Tokenizer | None, literals: str) -> dict[int, str]:
    tags = {token: tokenizer.token(token) for token in tokenizer.special_ids} if tokenizer is not None else {}
    return {token: tag for token, tag in tags.items() if tag and tag in literals}


def _choice(choice: str | Mapping[str, Any], names: Sequence[str]) -> tuple[Mode, set[str]]:
    """The mode of ``tool_choice``, and the tools that may be called."""
    if isinstance(choice, str):
        if choice == "required" and not names:
            raise ApiError(400, "tool_choice is 'required' and there are no tools; give tools", "tool_choice")
        return choice, set(names)  # type: ignore[return-value]
    if choice["type"] == "allowed_tools":
        allowed = [_named(tool) for tool in choice["allowed_tools"]["tools"]]
        mode = choice["allowed_tools"]["mode"]
    else:
        allowed = [choice["function"]["name"]]
        mode = "named"
    if unknown := [name for name in allowed if name not in names]:
        raise ApiError(400, f"tool_choice names {unknown[0]!r}, which is not among the tools; add it to tools", "tool_choice")
    return mode, set(allowed)


def _named(tool: Mapping[str, Any]) -> Any:
    """The name in a reference of ``allowed_tools``, whose type the openai package leaves open; None: it has none."""
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


def _check_tool(tool: Mapping[str, Any], at: str, config: ServeConfig) -> None:
    function = tool["function"]
    if not _NAME.fullmatch(function["name"]):
        message = f"{at}.function.name is {function['name']!r:.80}; use 1 to 64 letters, digits, underscores and dashes"
        raise ApiError(400, message, f"{at}.function.name")
    check_schema(function.get("parameters") or {}, f"{at}.function.parameters", config)
