"""A request to /v1/responses in terms of /v1/chat/completions: its fields, their types, and the same chat.

Nothing is stored: ``store`` may be false or absent, which means false here and true to OpenAI, and a conversation is sent as a
whole in ``input``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from tide_serve.errors import ApiError
from tide_serve.observe.request_record import note_no_effect
from tide_serve.request import fields
from tide_serve.request.body import OneOf, Part, Refused
from tide_serve.request.tool_results import text_parts

LOGPROBS = "message.output_text.logprobs"  # the only value of ``include`` that has an effect
# Field of a chat → the same of a response; the first that fits.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}

# --- types


class Text(Part):
    type: Literal["input_text", "output_text", "text"]
    text: str


class Message(Part):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[str | list[Annotated[Text | fields.RefusalPart, OneOf()]], OneOf()]


class FunctionCall(Part):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CustomToolCall(Part):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class CallOutput(Part):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Annotated[str | list[Annotated[Text | fields.Other, OneOf()]], OneOf()]


class ReasoningText(Part):
    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(Part):
    """Thoughts of an earlier answer. A summary of them is not what the model thought, and changes nothing."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


class FunctionTool(Part):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Part):
    type: Literal["function"]
    name: str


class Allowed(fields.AllowedTools):
    type: Literal["allowed_tools"]


class JsonSchema(fields.Schema):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class TextConfig(Part):
    format: Annotated[fields.PlainFormat | JsonSchema | fields.RegexFormat | fields.LarkFormat, OneOf()] | None = None
    verbosity: Any = None


Item = Annotated[Message | FunctionCall | CustomToolCall | CallOutput | ReasoningItem, OneOf(default="message")]


class ResponseBody(fields.ChatSampling):
    input: Annotated[str | list[Item], OneOf()]
    instructions: str | None = None
    max_output_tokens: int | None = None
    include: list[str] | None = None
    text: TextConfig | None = None
    reasoning: fields.Reasoning | None = None
    tools: list[Annotated[FunctionTool | fields.Other, OneOf()]] | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedFunction | Allowed, OneOf()] | None = None
    parallel_tool_calls: bool | None = None
    stream_options: fields.StreamOptions | None = None
    top_logprobs: int | None = None
    stop: fields.Stop | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


_SAME = (*fields.ChatSampling.model_fields, "stream_options", "top_logprobs", "parallel_tool_calls", "reasoning", "stop")
RESPONSE = fields.form(
    ResponseBody,
    {
        **fields.chat_fields_elsewhere(ResponseBody),
        "background": Refused("a response is generated while its request is open; leave it out", (False,)),
        "conversation": Refused("nothing is stored here; send the whole conversation as input"),
        "previous_response_id": Refused("nothing is stored here; send the whole conversation as input"),
        "prompt": Refused("no prompt templates are stored here; send the prompt as input"),
    },
)


# --- the same chat


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the same request to /v1/chat/completions. Raises ApiError for what that has no fields for."""
    with_logprobs = LOGPROBS in body.get("include", [])
    if body.get("top_logprobs") and not with_logprobs:
        raise ApiError(400, f'top_logprobs needs include: ["{LOGPROBS}"]; set both', "top_logprobs")
    note_no_effect(*(f"include={name}" for name in body.get("include", []) if name != LOGPROBS))
    note_no_effect(*(f"text.{name}" for name in body.get("text", {}) if name == "verbosity"))
    chat = {name: body[name] for name in _SAME if name in body}
    chat |= {"messages": _chat_messages(body["input"], body.get("instructions")), "logprobs": with_logprobs}
    if "max_output_tokens" in body:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if "tools" in body:
        chat["tools"] = [_chat_tool(tool) for tool in body["tools"]]
    if "tool_choice" in body:
        chat["tool_choice"] = _chat_choice(body["tool_choice"])
    if (form := body.get("text", {}).get("format")) is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": form} if form["type"] == "json_schema" else form
    return chat


def _chat_messages(items: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The same messages; ``instructions`` come first, as those of the system.

    Calls follow each other in one message, after what the assistant thought and wrote before them.
    """
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        kind = item.get("type", "message")
        if kind == "message":
            begun = messages.pop() if item["role"] == "assistant" and messages and _is_thoughts(messages[-1]) else {}
            messages.append({**begun, "role": item["role"], "content": _text(item["content"])})
        elif kind == "reasoning":
            if thoughts := _text(item.get("content") or []):
                messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})
        elif kind in ("function_call", "custom_tool_call"):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            arguments = item["arguments"] if kind == "function_call" else json.dumps({"input": item["input"]})
            function = {"name": item["name"], "arguments": arguments}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "tool", "content": _text(text_parts(item["output"])), "tool_call_id": item["call_id"]})
    return messages


def _is_thoughts(message: Mapping[str, Any]) -> bool:
    """Whether ``message`` has nothing but thoughts."""
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool["type"] != "function":
        return {"type": tool["type"]}
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _chat_choice(choice: str | Mapping[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    if choice["type"] == "function":
        return {"type": "function", "function": {"name": choice["name"]}}
    allowed = [{"type": "function", "function": {"name": tool.get("name")}} for tool in choice["tools"]]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": allowed}}


def response_field(param: str) -> str:
    """The name in a response's request of a chat's field."""
    for chat, name in _NAMES.items():
        if param == chat or param.startswith(f"{chat}."):
            return name + param[len(chat) :]
    return param.replace(".function.", ".")
