"""Messages of a chat request, as the model's chat template takes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Union

from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionFunctionMessageParam,
    ChatCompletionMessageToolCallUnionParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)

from tide_serve.errors import ApiError


class AnswerMessageParam(ChatCompletionAssistantMessageParam, total=False):
    """An assistant's message as clients send it back: with fields of answers, of which only the reasoning means something."""

    tool_calls: Iterable[ChatCompletionMessageToolCallUnionParam] | None  # type: ignore[misc]
    annotations: list[Any] | None
    provider_specific_fields: dict[str, Any] | None
    reasoning_content: str | None


MessageParam = Union[  # noqa: UP007
    ChatCompletionDeveloperMessageParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionUserMessageParam,
    AnswerMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionFunctionMessageParam,
]


def template_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` for a chat template: content is a string, developers are role ``system``, arguments of calls are objects.

    Raises ApiError with the place as ``param`` for what a text model cannot take: images, audio, files, functions of old.
    """
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: dict[str, Any], at: str) -> dict[str, Any]:
    role = message["role"]
    if role == "function":
        raise ApiError(400, f"{at}.role is 'function', the former form of 'tool'; use that", f"{at}.role")
    for name, instead in (("audio", "its text as content"), ("function_call", "tool_calls")):
        if message.get(name) is not None:
            raise ApiError(400, f"{at}.{name} is not supported; send {instead}", f"{at}.{name}")
    content, calls = message.get("content"), message.get("tool_calls")
    if content is None:
        content = message.get("refusal") or ""
        if role == "assistant" and not (content or calls):
            raise ApiError(400, f"{at}.content is missing; give a text, or tool_calls", f"{at}.content")
    rendered = {"role": "system" if role == "developer" else role, "content": _text(content, f"{at}.content")}
    if calls:
        rendered["tool_calls"] = [_call(call, f"{at}.tool_calls[{index}]") for index, call in enumerate(calls)]
    passed = {key: message[key] for key in ("name", "tool_call_id", "reasoning_content") if message.get(key) is not None}
    return rendered | passed


def _text(content: str | list[dict[str, Any]], at: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if part["type"] not in ("text", "refusal"):
            message = f"{at}[{index}].type is {part['type']!r}, the model takes text only; send parts of type 'text'"
            raise ApiError(400, message, f"{at}[{index}].type")
        texts.append(part[part["type"]])
    return "".join(texts)


def _call(call: dict[str, Any], at: str) -> dict[str, Any]:
    if call["type"] != "function":
        raise ApiError(400, f"{at}.type is {call['type']!r}, expected 'function'", f"{at}.type")
    arguments = call["function"]["arguments"]
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        parsed = arguments  # as the model wrote it
    return {"id": call["id"], "type": "function", "function": {"name": call["function"]["name"], "arguments": parsed}}
