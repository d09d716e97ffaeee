"""A request to Anthropic's /v1/messages in terms of /v1/chat/completions: its fields, their types, and the same chat."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from tide_serve.errors import ApiError
from tide_serve.observe.request_record import note_no_effect
from tide_serve.request.body import OneOf, Part, Refused
from tide_serve.request.fields import ChatSampling, Other, TextPart, chat_fields_elsewhere, form
from tide_serve.request.tool_results import text_parts

# Field of a chat → the same of a message.
_NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning.enabled": "thinking.type",
    "reasoning.max_tokens": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Claude Code begins its system prompt with a line for its accounts that differs in every request: no prefix would be found again.
ACCOUNTS = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")

# --- types


class ThinkingBlock(Part):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Part):
    type: Literal["redacted_thinking"]  # thoughts that only another server can read; they are left out


class ToolUseBlock(Part):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Part):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | list[Annotated[TextPart | Other, OneOf()]], OneOf()] | None = None
    is_error: bool | None = None


class AskingMessage(Part):
    role: Literal["user", "system"]
    content: Annotated[str | list[Annotated[TextPart | ToolResultBlock, OneOf()]], OneOf()]


Block = Annotated[TextPart | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, OneOf()]


class AssistantMessage(Part):
    role: Literal["assistant"]
    content: Annotated[str | list[Block], OneOf()]


class Tool(Part):
    type: Literal["custom"] | None = None
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ToolChoice(Part):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedTool(Part):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class Thinking(Part):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(Part):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Part):
    effort: str | None = None
    format: OutputFormat | None = None


class CountBody(ChatSampling):
    """The body of /v1/messages/count_tokens."""

    messages: list[Annotated[AskingMessage | AssistantMessage, OneOf("role")]]
    system: Annotated[str | list[TextPart], OneOf()] | None = None
    tools: list[Annotated[Tool | Other, OneOf(default="custom")]] | None = None
    tool_choice: Annotated[ToolChoice | NamedTool, OneOf()] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stop_sequences: list[str] | None = None


class MessageBody(CountBody):
    max_tokens: int


_REFUSED = {
    **chat_fields_elsewhere(MessageBody),
    "mcp_servers": Refused("no servers of tools are called here; call them yourself, and give their tools", ([],)),
}
MESSAGE = form(MessageBody, _REFUSED)
COUNT = form(CountBody, _REFUSED)


# --- the same chat


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the same request to /v1/chat/completions. Raises ApiError for what that has no fields for."""
    chat = {name: body[name] for name in (*ChatSampling.model_fields, "max_tokens") if name in body}
    chat["messages"] = _chat_messages(body["messages"], body.get("system", ""))
    if chat["messages"][-1]["role"] == "assistant":
        chat["continue_final_message"] = True
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    if "tools" in body:
        chat["tools"] = [_chat_tool(tool) for tool in body["tools"]]
    if "tool_choice" in body:
        chat |= _chat_choice(body["tool_choice"], bool(chat.get("tools")))
    if "thinking" in body:
        chat["reasoning"] = _chat_reasoning(body["thinking"])
    output = body.get("output_config", {})
    if output.get("effort") is not None:
        chat["reasoning_effort"] = output["effort"]
    if output.get("format") is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": output["format"]["schema"]}}
    return chat


def _chat_reasoning(thinking: Mapping[str, Any]) -> dict[str, Any]:
    if thinking["type"] == "adaptive":  # as the model likes
        return {}
    return {"enabled": thinking["type"] == "enabled", "max_tokens": thinking.get("budget_tokens")}


def _chat_messages(messages: Sequence[Mapping[str, Any]], system: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same messages: consecutive ones of a role are one, as in Anthropic's API, and each tool's result is one of its own.

    Raises ApiError for a message without content.
    """
    if not messages:
        raise ApiError(400, "messages is empty; give at least one", "messages")
    turns: list[dict[str, Any]] = []
    if text := ACCOUNTS.sub("", _text(system)):
        turns.append({"role": "system", "content": text})
    for index, message in enumerate(messages):
        if not message["content"]:
            raise ApiError(400, f"messages[{index}].content is empty; give a text or blocks", f"messages[{index}].content")
        for block in _blocks(message["content"]):
            _add(turns, message["role"], block)
    return turns


def _add(turns: list[dict[str, Any]], role: str, block: Mapping[str, Any]) -> None:
    """Add ``block`` to the last turn where that is of the same role; otherwise it begins one."""
    if block["type"] == "redacted_thinking":
        note_no_effect("messages[].content[].type=redacted_thinking")
        return
    if block["type"] == "tool_result":
        failed = "Error: " if block.get("is_error") else ""
        content = failed + _text(text_parts(block.get("content") or ""))
        turns.append({"role": "tool", "content": content, "tool_call_id": block["tool_use_id"]})
        return
    if not turns or turns[-1]["role"] != role:
        turns.append({"role": role, "content": ""})
    turn = turns[-1]
    if block["type"] == "text":
        turn["content"] = _joined(turn["content"], block["text"])
    elif block["type"] == "thinking":
        turn["reasoning_content"] = _joined(turn.get("reasoning_content"), block["thinking"])
    else:
        function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
        turn["content"] = turn["content"] or None  # as OpenAI's answers have it beside calls
        turn.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})


def _blocks(content: str | Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(block["text"] for block in _blocks(content))


def _joined(before: str | None, text: str) -> str:
    return f"{before}\n{text}" if before else text


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if (kind := tool.get("type") or "custom") != "custom":
        return {"type": kind}
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _chat_choice(choice: Mapping[str, Any], has_tools: bool) -> dict[str, Any]:
    kind = choice["type"]
    parallel = not choice.get("disable_parallel_tool_use", False)
    if kind == "any" and not has_tools:
        raise ApiError(400, "tool_choice asks for a call and there are no tools; give tools", "tool_choice")
    named = {"type": "function", "function": {"name": choice["name"]}} if kind == "tool" else None
    return {"tool_choice": named or _CHOICES[kind], "parallel_tool_calls": parallel}


def message_field(param: str) -> str:
    """The name in a message's request of a chat's field."""
    return _NAMES.get(param) or param.replace(".function.parameters", ".input_schema").replace(".function.", ".")
