"""Rendering of a chat as a prompt with the model's Jinja template, equivalent to transformers' apply_chat_template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from tide_runtime.errors import PromptError

if TYPE_CHECKING:
    import jinja2

    from tide_runtime.text.template_forms import TemplateForms
    from tide_runtime.text.template_thoughts import TemplateThoughts
    from tide_runtime.text.template_turns import TemplateTurns

# Exceptions that a template, which is code of the model's author, may raise on unexpected messages.
TEMPLATE_FAULTS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool = True,
    **extra: Any,
) -> str:
    """The prompt text of a chat. It includes special tokens, so encode it with `add_special_tokens=False`.

    Args:
        template: the model's chat template (Jinja).
        messages: the turns so far, each with a "role" and a "content" of text or text parts, which may be None beside
            "tool_calls". They need not be in the form that the template takes, see `template_forms`.
        special_tokens: names the template may use, such as {"bos_token": "<s>", "eos_token": "</s>"}.
        add_generation_prompt: end with the opening of the assistant's turn.
        extra: further variables of the template, such as `tools` or `enable_thinking`; JSON values.

    Raises:
        PromptError: there is no template, a message is malformed, or the template is broken or rejects the messages.
    """
    import jinja2

    if not template:
        raise PromptError("This model has no chat template; pass plain text as prompt instead of messages.")
    variables: dict[str, Any] = {"tools": None, "documents": None, **special_tokens, **_as_json_values(extra)}
    turns = _checked(messages)
    analysis = analysed(template)
    forms, thoughts = analysis.forms, analysis.thoughts
    variables["messages"] = [thoughts.message(forms.message(turn)) for turn in analysis.turns.folded(turns)]
    variables["add_generation_prompt"] = add_generation_prompt
    try:
        return _compiled(template).render(variables)
    except (jinja2.TemplateError, *TEMPLATE_FAULTS) as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise PromptError(
            f"The chat template refused the messages (roles: {roles}): {error}. Expected turns as the model was "
            "trained on, mostly an optional system, then user and assistant in turn; change the messages to match."
        ) from error


def _checked(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The validated messages as JSON values, so that a template cannot call methods of other objects."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise PromptError(f'Messages are a {type(messages).__name__}; pass a list of {{"role": …, "content": …}}.')
    if not messages:
        raise PromptError('The chat has no messages; pass at least one {"role": "user", "content": …}.')
    for index, message in enumerate(messages):
        _check_message(index, message)
    return [_as_json_values(dict(message)) for message in messages]


def _check_message(index: int, message: object) -> None:
    if not isinstance(message, Mapping):
        raise PromptError(f'Message {index} is {message!r:.80}; expected {{"role": …, "content": …}}.')
    for key in ("role", "content"):
        if key not in message and not (key == "content" and message.get("tool_calls")):
            raise PromptError(f'Message {index} has no "{key}"; expected {{"role": …, "content": …}}.')
    role = message["role"]
    content = message.get("content")
    calls = message.get("tool_calls")
    if not isinstance(role, str):
        raise PromptError(f'"role" of message {index} is {role!r:.80}; expected a string.')
    if not (isinstance(content, str) or _is_parts(content) or (content is None and calls)):
        expected = 'expected a string, or parts such as {"type": "text", "text": …}'
        raise PromptError(f'"content" of message {index} is {content!r:.80}; {expected}.')
    if calls is not None and not (isinstance(calls, list | tuple) and all(isinstance(call, Mapping) for call in calls)):
        raise PromptError(f'"tool_calls" of message {index} is {calls!r:.80}; expected a list of objects.')


def _is_parts(content: object) -> bool:
    if not isinstance(content, list | tuple):
        return False
    return all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content)


def _as_json_values(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise PromptError(f"Chat templates take JSON values only: {error}.") from error


@dataclass(frozen=True)
class TemplateAnalysis:
    """What rendering made-up chats has shown of a template."""

    forms: TemplateForms
    turns: TemplateTurns
    thoughts: TemplateThoughts


@lru_cache(maxsize=16)
def analysed(template: str) -> TemplateAnalysis:
    """The forms, orders and thoughts of messages that ``template`` takes. Raises PromptError where it is broken."""
    from tide_runtime.text.template_forms import TemplateForms
    from tide_runtime.text.template_thoughts import TemplateThoughts
    from tide_runtime.text.template_turns import TemplateTurns

    _compiled(template)
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}}

    def render(messages: Sequence[Mapping[str, Any]]) -> str | None:
        tries = (_rendered(template, messages, tools=tools, add_generation_prompt=True) for tools in ([tool], None))
        return next((text for text in tries if text is not None), None)

    forms = TemplateForms.of(_environment().parse(template), render)
    turns = TemplateTurns.of(lambda messages: render([forms.message(message) for message in messages]), forms.shows_calls)
    return TemplateAnalysis(forms, turns, TemplateThoughts.of(template, _environment(), partial(_rendered, template), forms))


def _rendered(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str | None:
    """``template`` for a made-up chat; None where it fails."""
    import jinja2

    names = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
    try:
        copies = _as_json_values({"messages": messages, **variables})
        return _compiled(template).render({**names, "tools": None, "documents": None, **copies})
    except (jinja2.TemplateError, *TEMPLATE_FAULTS):
        return None


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    import jinja2

    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise PromptError(f"The chat template has a syntax error in line {error.lineno}: {error.message}.") from error


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import SandboxedEnvironment

    # Templates come with downloaded models, so they run in a sandbox. Some append to lists of their own (Kimi K2), so lists may
    # grow: what is passed to a template is a copy.
    environment = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_generation_block(), loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _generation_block() -> type[jinja2.ext.Extension]:
    """Jinja extension for `{% generation %}`, which marks the assistant's text for training; a prompt renders only its body."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationBlock(Extension):
        tags = frozenset({"generation"})  # type: ignore[assignment]

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return GenerationBlock


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replacement for Jinja's tojson, which escapes HTML, unlike the text that models were trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
