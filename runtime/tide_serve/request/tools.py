"""Tools of a request: what the model is told about them, and the grammar of its calls.

A chat template that takes ``tools`` shows them in the form that its model was trained on. For other models a system message
describes them; calls and results of earlier turns that a template does not show become text of the same form, that of Hermes and
SmolLM2:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

``tool_choice`` "required" or a named function, and ``strict`` tools, make the output follow a grammar, so that calls always
parse. With "auto" and tools that are not strict, calls are found in the text (see `tide_serve.request.tool_calls`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tide_runtime import Engine, Grammar
from tide_runtime.text.chat_template import template_forms
from tide_runtime.text.grammar import JSON_STYLE
from tide_runtime.text.tokenizer import Tokenizer

from tide_serve.config import ServeConfig
from tide_serve.errors import ApiError
from tide_serve.request.call_formats import CLOSING, OPENING, TAGS
from tide_serve.request.structured import check_schema
from tide_serve.request.tool_calls import ToolCallParser
from tide_serve.request.tool_results import functions_of

MAX_CALLS = 8  # most calls of an answer that follows a grammar: a model that does not stop by itself must
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class ToolPlan:
    """What a request allows the model to call.

    Args:
        tools: the definitions, as the chat template takes them; empty: no calls.
        required: the answer is calls and nothing else.
        parallel: it may have several.
        shown, calls_shown: the model's template shows tools, and calls of earlier turns; otherwise they become text.
        tagged: calls stand between <tool_call> and </tool_call>; otherwise the answer is one call.
        opening, closing: these tags in a Lark grammar.
        special: id → tag of calls that is a special token; the text of the output has it, unlike others.
    """

    tools: tuple[dict[str, Any], ...] = ()
    required: bool = False
    parallel: bool = True
    shown: bool = False
    calls_shown: bool = False
    tagged: bool = True
    opening: str = f'"{OPENING}"'
    closing: str = f'"{CLOSING}"'
    special: Mapping[int, str] = field(default_factory=dict)

    def parser(self) -> ToolCallParser | None:
        """The reader of calls for one output; None: all of it is text."""
        return ToolCallParser(self._schemas, self.special.values(), self._most) if self.tools else None

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the output: after the first call where there may be no other, and no grammar ends it.

        With the line break, which no JSON string has, a tag in an argument ends nothing.
        """
        return (f"\n{CLOSING}",) if self.tools and self.tagged and not self.parallel and not self._follows_grammar else ()

    @property
    def _schemas(self) -> dict[str, Mapping[str, Any]]:
        return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}

    @property
    def _most(self) -> int | None:
        return None if self.parallel else 1

    @property
    def _follows_grammar(self) -> bool:
        return self.required or any(tool["function"].get("strict") for tool in self.tools)

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """The grammar of the whole output, where ``answer`` is that of its text. Raises ApiError where they do not combine."""
        if not self.tools or (not self._follows_grammar and answer is None):
            return answer
        rules = [*self._call_rules()]
        if self.required:
            rules.append("start: calls")
        elif answer is not None:
            if answer.kind != "json_schema":
                message = "response_format: a regex or Lark grammar cannot be combined with tools; use a JSON schema"
                raise ApiError(400, message, "response_format")
            rules += ["start: calls | answer", f"answer: %json {_styled(json.loads(answer.source))}"]
        elif self.tagged:
            rules += ["start: (head body)* tail" if self.parallel else "start: head body | tail"]
            rules += [f"head{'' if self.opening.startswith('<') else '[lazy]'}: TEXT {self.opening}"]
            rules += ["tail: TEXT", r"TEXT: /(.|\n)*/"]
        else:
            rules += ["start: calls | tail", "tail: TEXT", r"TEXT: /([^{](.|\n)*)?/"]
        return Grammar.lark("\n".join(rules))

    def _call_rules(self) -> list[str]:
        functions = [tool["function"] for tool in self.tools]
        rules = [f"function: {' | '.join(f'function_{i}' for i in range(len(functions)))}"]
        for i, function in enumerate(functions):
            # In the pieces of JSON: a longer string would shut out an answer that begins like a call.
            pieces = ["{", '"name"', ": ", f'"{function["name"]}"', ", ", '"arguments"', ": "]
            rules.append(f'function_{i}: {" ".join(map(json.dumps, pieces))} arguments_{i} "}}"')
            rules.append(f"arguments_{i}: %json {_arguments_schema(function)}")
        if not self.tagged:
            return [*rules, "calls: function"]
        rules += [rf'body: "\n" function "\n" {self.closing}', f"call: {self.opening} body"]
        return [*rules, rf'calls: call ("\n" call){{0,{MAX_CALLS - 1}}}' if self.parallel else "calls: call"]


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
    forms = template_forms(template)
    calls_shown = forms.takes_tools or forms.shows_calls
    if not uses_tools:
        return ToolPlan(calls_shown=calls_shown)
    tagged = not forms.takes_tools or OPENING in template
    return ToolPlan(
        tools=tuple(tool for tool in tools if tool["function"]["name"] in allowed),
        required=mode != "auto",
        parallel=mode != "named" and body.get("parallel_tool_calls", True),
        shown=forms.takes_tools,
        calls_shown=calls_shown,
        tagged=tagged,
        opening=_in_lark(engine.tokenizer, OPENING),
        closing=_in_lark(engine.tokenizer, CLOSING),
        special=_special_tags(engine.tokenizer),
    )


def _in_lark(tokenizer: Tokenizer | None, tag: str) -> str:
    """``tag`` in a Lark grammar: by its id where it is one token, as llguidance does not match such tokens as text."""
    ids = tokenizer.encode(tag, add_special_tokens=False) if tokenizer is not None else []
    return f"<[{ids[0]}]>" if len(ids) == 1 else f'"{tag}"'


def _special_tags(tokenizer: Tokenizer | None) -> dict[int, str]:
    tags = {tokenizer.token(token): token for token in tokenizer.special_ids} if tokenizer is not None else {}
    return {tags[tag]: tag for tag in TAGS if tag in tags}


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
        allowed, mode = [choice["function"]["name"]], "named"
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


def _arguments_schema(function: Mapping[str, Any]) -> str:
    """Keywords that llguidance lacks are left out of a schema that is not strict: the call still parses."""
    schema = {"type": "object", **(function.get("parameters") or {})}
    return _styled(schema, lenient=not function.get("strict"))


def _styled(schema: dict[str, Any], lenient: bool = False) -> str:
    """``schema`` with JSON on one line: without free white space most of a call follows from the grammar."""
    return json.dumps({**schema, "x-guidance": {**JSON_STYLE, "lenient": lenient}})
