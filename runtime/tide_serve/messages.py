"""Messages of a chat request: their types, and what the model's chat template is given of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Required, Union

from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionFunctionMessageParam,
    ChatCompletionMessageCustomToolCallParam,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat.chat_completion_message_function_tool_call_param import Function
from tide_runtime.text.message_parts import arguments_object, joined_parts

from tide_serve.call_formats import CLOSING, OPENING
from tide_serve.errors import ApiError

# Clients send messages back as they came, with fields of answers and of streams. Those that say nothing to a model are ignored.


class CalledFunctionParam(Function, total=False):
    parsed_arguments: Any


class CallParam(ChatCompletionMessageFunctionToolCallParam, total=False):
    function: Required[CalledFunctionParam]  # type: ignore[misc]
    index: int | None


class AnswerMessageParam(ChatCompletionAssistantMessageParam, total=False):
    """An assistant's message."""

    tool_calls: Iterable[CallParam | ChatCompletionMessageCustomToolCallParam] | None  # type: ignore[misc]
    name: str | None  # type: ignore[misc]
    id: str | None
    annotations: list[Any] | None
    parsed: Any
    provider_specific_fields: dict[str, Any] | None
    reasoning_content: str | None
    reasoning: str | None


class ToolMessageParam(ChatCompletionToolMessageParam, total=False):
    """What a call has returned."""

    name: str | None


class UserMessageParam(ChatCompletionUserMessageParam, total=False):
    name: str | None  # type: ignore[misc]


class SystemMessageParam(ChatCompletionSystemMessageParam, total=False):
    name: str | None  # type: ignore[misc]


class DeveloperMessageParam(ChatCompletionDeveloperMessageParam, total=False):
    name: str | None  # type: ignore[misc]


MessageParam = Union[  # noqa: UP007
    DeveloperMessageParam,
    SystemMessageParam,
    UserMessageParam,
    AnswerMessageParam,
    ToolMessageParam,
    ChatCompletionFunctionMessageParam,
]
_PASSED = ("name", "tool_call_id", "reasoning_content", "reasoning")
_DESCRIPTION = """You can call these functions:
{functions}
To call one, answer with its name and arguments as JSON, for each call:
{opening}
{{"name": "FUNCTION", "arguments": {{"ARGUMENT": VALUE}}}}
{closing}
The results come between <tool_response> and </tool_response>. Answer in plain text when no call is needed."""


def template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` without what says nothing to a model. The engine brings them into the form that its template takes.

    Raises ApiError with the place as ``param`` for what a text model cannot take: images, audio, files, functions of old.
    """
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def with_tools_described(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with ``tools`` in the system message, where the template does not show them."""
    functions = "\n".join(json.dumps(_shown(tool["function"]), ensure_ascii=False) for tool in tools)
    description = _DESCRIPTION.format(functions=functions, opening=OPENING, closing=CLOSING)
    if messages[0]["role"] in ("system", "developer"):
        content = f"{joined_parts(messages[0]['content'])}\n\n{description}".strip()
        return [{**messages[0], "content": content}, *messages[1:]]
    return [{"role": "system", "content": description}, *messages]


def with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """``message`` with its calls, or what they returned, as text, where the template does not show them."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{joined_parts(message['content'])}\n</tool_response>"}
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [{**function, "arguments": arguments_object(function["arguments"])} for function in functions]
    blocks = [f"{OPENING}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSING}" for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    content = joined_parts(message["content"] or "")
    return {**rest, "content": "\n".join([content, *blocks] if content else blocks)}


def _template_message(message: dict[str, Any], at: str) -> dict[str, Any]:
    role = message["role"]
    if role == "function":
        raise ApiError(400, f"{at}.role is 'function', the former form of 'tool'; use that", f"{at}.role")
    for name, instead in (("audio", "its text as content"), ("function_call", "tool_calls")):
        if message.get(name) is not None:
            raise ApiError(400, f"{at}.{name} is not supported; send {instead}", f"{at}.{name}")
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None:
        content = message.get("refusal")
        if role == "assistant" and not (content or calls):
            raise ApiError(400, f"{at}.content is missing; give a text, or tool_calls", f"{at}.content")
    rendered = {"role": role, "content": _content(content, f"{at}.content")}
    if calls:
        rendered["tool_calls"] = [_call(call, f"{at}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return rendered | {key: message[key] for key in _PASSED if message.get(key) is not None}


def _content(content: str | list[dict[str, Any]] | None, at: str) -> str | list[dict[str, Any]] | None:
    if content is None or isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part["type"] not in ("text", "refusal"):
            message = f"{at}[{index}].type is {part['type']!r}, the model takes text only; send parts of type 'text'"
            raise ApiError(400, message, f"{at}[{index}].type")
    return [{"type": "text", "text": part[part["type"]]} for part in content]


def _call(call: dict[str, Any], at: str) -> dict[str, Any]:
    if call["type"] != "function":
        raise ApiError(400, f"{at}.type is {call['type']!r}, expected 'function'", f"{at}.type")
    function = {name: call["function"][name] for name in ("name", "arguments")}
    return {"id": call["id"], "type": "function", "function": function}


def _shown(function: dict[str, Any]) -> dict[str, Any]:
    return {key: function[key] for key in ("name", "description", "parameters") if function.get(key)}
