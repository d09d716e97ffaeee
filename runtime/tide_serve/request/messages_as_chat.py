"""A request to Anthropic's /v1/messages in terms of /v1/chat/completions: its fields, and the same chat."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tide_serve.errors import ApiError
from tide_serve.request.body import BodyForm, RequestTypes, Support
from tide_serve.request.fields import HARMLESS, SUPPORTED, refused

_SAME = (
    "model", "max_tokens", "stream", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "logit_bias", "seed", "ignore_eos", "depth_policy", "cache_salt",
)  # fmt: skip
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

_PROMPT_FIELDS: dict[str, Support] = {
    **dict.fromkeys(("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"), SUPPORTED),
    "cache_control": HARMLESS,  # prefixes are cached without breakpoints, for as long as there is memory
    "context_management": refused("the context is what messages holds; shorten that, and leave it out"),
    "mcp_servers": refused("no servers of tools are called here; call them yourself, and give their tools"),
    "speed": refused("there is one speed; set it to standard, or leave it out", "standard"),
}
MESSAGE_FIELDS: dict[str, Support] = {
    **_PROMPT_FIELDS,
    **dict.fromkeys((*_SAME, "stop_sequences"), SUPPORTED),
    "metadata": HARMLESS,
    "container": refused("nothing is executed here; leave it out"),
    "diagnostics": refused("no earlier message is stored here; usage tells what was cached; leave it out"),
    "inference_geo": refused("a request runs on the server that it is sent to; leave it out"),
    "service_tier": refused("there is one tier; set it to auto, or leave it out", "auto", "standard_only"),
}


def _types(*required: str) -> RequestTypes:
    from tide_serve.request.message_types import message_types  # takes over a second

    return message_types(required)


MESSAGE = BodyForm("MessageRequest", MESSAGE_FIELDS, lambda: _types("model", "max_tokens", "messages"))
COUNT = BodyForm("CountTokensRequest", _PROMPT_FIELDS, lambda: _types("model", "messages"))


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the same request to /v1/chat/completions. Raises ApiError for what that has no fields for."""
    chat = {name: body[name] for name in _SAME if name in body}
    chat["messages"] = _chat_messages(body["messages"], body.get("system", ""))
    if "stop_sequences" in body:
        chat["stop"] = body["stop_sequences"]
    if "tools" in body:
        chat["tools"] = [_chat_tool(tool) for tool in body["tools"]]
    if "tool_choice" in body:
        chat |= _chat_choice(body["tool_choice"], bool(body.get("tools")))
    if "thinking" in body:
        chat["reasoning"] = _chat_reasoning(body["thinking"])
    output = body.get("output_config", {})
    if output.get("effort") is not None:
        chat["reasoning_effort"] = output["effort"]
    if output.get("format") is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": output["format"]["schema"]}}
    return chat


def _chat_reasoning(thinking: Mapping[str, Any]) -> dict[str, Any]:
    kind = thinking["type"]
    if kind == "between_tools" or thinking.get("display") == "omitted":
        name, value = ("thinking.type", kind) if kind == "between_tools" else ("thinking.display", "omitted")
        raise ApiError(400, f"{name} is {value!r}, which cannot be done here; leave it out", name, "unsupported_parameter")
    if kind == "enabled":
        return {"enabled": True, "max_tokens": thinking["budget_tokens"]}
    return {"enabled": False} if kind == "disabled" else {}  # "adaptive": as the model likes


def _chat_messages(messages: Sequence[Mapping[str, Any]], system: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same messages: consecutive ones of a role are one, as in Anthropic's API, and each tool's result is one of its own.

    Raises ApiError for a message without content, and where the answer would have to go on from the last one.
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
    if messages[-1]["role"] == "assistant":
        reason = "ends with the assistant's message, and an answer cannot begin with given text here; end with the user's"
        raise ApiError(400, f"messages {reason}", "messages", "unsupported_parameter")
    return turns


def _add(turns: list[dict[str, Any]], role: str, block: Mapping[str, Any]) -> None:
    """Add ``block`` to the last turn where that is of the same role; otherwise it begins one."""
    if block["type"] == "tool_result":
        failed = "Error: " if block.get("is_error") else ""
        content = failed + _text(block.get("content", ""))
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
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _chat_choice(choice: Mapping[str, Any], has_tools: bool) -> dict[str, Any]:
    kind, parallel = choice["type"], not choice.get("disable_parallel_tool_use", False)
    if kind == "any" and not has_tools:
        raise ApiError(400, "tool_choice asks for a call and there are no tools; give tools", "tool_choice")
    named = {"type": "function", "function": {"name": choice["name"]}} if kind == "tool" else None
    return {"tool_choice": named or _CHOICES[kind], "parallel_tool_calls": parallel}


def message_field(param: str) -> str:
    """The name in a message's request of a chat's field."""
    return _NAMES.get(param) or param.replace(".function.parameters", ".input_schema").replace(".function.", ".")
