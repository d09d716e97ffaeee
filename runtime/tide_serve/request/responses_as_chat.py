"""A request to /v1/responses in terms of /v1/chat/completions: its fields, their types, and the same chat.

Nothing is stored: ``store`` may be false or absent, which means false here and true to OpenAI, and a conversation is sent as a
whole in ``input``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, Union

from openai.types.responses import ResponseOutputRefusalParam, ToolChoiceAllowedParam, ToolChoiceFunctionParam
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from openai.types.responses.response_format_text_json_schema_config_param import ResponseFormatTextJSONSchemaConfigParam
from openai.types.shared_params import ResponseFormatJSONObject, ResponseFormatText
from typing_extensions import TypedDict

from tide_serve.errors import ApiError
from tide_serve.request.body import BodyForm, RequestTypes, Support
from tide_serve.request.fields import CHAT_FIELDS, EXTENSION_TYPES, SUPPORTED, THOUGHT_TYPES, refused
from tide_serve.request.structured import LarkFormat, RegexFormat
from tide_serve.request.thinking import ReasoningParam

LOGPROBS = "message.output_text.logprobs"  # the only value of ``include``
_SAME = (
    "model", "stream", "stream_options", "temperature", "top_p", "top_logprobs", "parallel_tool_calls", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "ignore_eos", "depth_policy",
    "cache_salt", "reasoning", "chat_template_kwargs",
)  # fmt: skip
_SAME_SUPPORT = (
    "tools", "tool_choice", "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "moderation", "service_tier", "store",
)  # fmt: skip
# Field of a chat → the same of a response; the first that fits.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}

RESPONSE_FIELDS: dict[str, Support] = {
    **{name: CHAT_FIELDS[name] for name in (*_SAME, *_SAME_SUPPORT)},
    **dict.fromkeys(("input", "instructions", "max_output_tokens", "include", "text"), SUPPORTED),
    "background": refused("a response is generated while its request is open; leave it out", False),
    "context_management": refused("the context is what input holds; shorten that, and leave it out"),
    "conversation": refused("nothing is stored here; send the whole conversation as input"),
    "max_tool_calls": refused("there are no built-in tools to call; leave it out"),
    "previous_response_id": refused("nothing is stored here; send the whole conversation as input"),
    "prompt": refused("no prompt templates are stored here; send the prompt as input"),
    "truncation": refused("an input that is too long is refused; set it to disabled, or leave it out", "disabled"),
}

# --- types

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(TypedDict, total=False):
    type: Required[Literal["input_text"]]
    text: Required[str]


class OutputText(TypedDict, total=False):
    """A part of an earlier answer, as it was sent. Its annotations and log-probabilities have no meaning for the model."""

    type: Required[Literal["output_text"]]
    text: Required[str]
    annotations: list[Any] | None
    logprobs: list[Any] | None


class Message(TypedDict, total=False):
    type: Required[Literal["message"]]
    role: Required[Literal["user", "assistant", "system", "developer"]]
    content: Required[Union[str, list[Union[InputText, OutputText, ResponseOutputRefusalParam]]]]  # noqa: UP007
    id: str | None
    status: Status | None
    phase: None


class FunctionCall(TypedDict, total=False):
    type: Required[Literal["function_call"]]
    call_id: Required[str]
    name: Required[str]
    arguments: Required[str]
    id: str | None
    status: Status | None
    namespace: None
    caller: None


class FunctionCallOutput(TypedDict, total=False):
    type: Required[Literal["function_call_output"]]
    call_id: Required[str]
    output: Required[Union[str, list[InputText]]]  # noqa: UP007
    id: str | None
    name: str | None
    status: Status | None
    namespace: None
    caller: None


class ReasoningText(TypedDict, total=False):
    type: Required[Literal["reasoning_text"]]
    text: Required[str]


class ReasoningItem(TypedDict, total=False):
    """Thoughts of an earlier answer, as they were sent. A summary of them is not what the model thought, and changes nothing."""

    type: Required[Literal["reasoning"]]
    content: list[ReasoningText] | None
    summary: list[Any] | None
    id: str | None
    status: Status | None
    encrypted_content: None


InputItem = Union[Message, FunctionCall, FunctionCallOutput, ReasoningItem]  # noqa: UP007


class ResponseReasoningParam(ReasoningParam, total=False):
    summary: str | None
    generate_summary: str | None


class FunctionTool(TypedDict, total=False):
    type: Required[Literal["function"]]
    name: Required[str]
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class TextConfig(TypedDict, total=False):
    format: Union[ResponseFormatText, ResponseFormatJSONObject, ResponseFormatTextJSONSchemaConfigParam, RegexFormat, LarkFormat]  # noqa: UP007
    verbosity: Literal["low", "medium", "high"] | None


class StreamOptions(TypedDict, total=False):
    include_obfuscation: bool


class _ResponseTypes(RequestTypes):
    """Types of a request whose message items may lack their ``type``."""

    def check(self, body: Mapping[str, Any]) -> None:
        if isinstance(items := body.get("input"), list):
            body = {**body, "input": [_with_type(item) for item in items]}
        super().check(body)


def _with_type(item: Any) -> Any:
    return {"type": "message", **item} if isinstance(item, dict) and "role" in item else item


def _response_types() -> RequestTypes:
    return _ResponseTypes(
        ResponseCreateParamsBase,
        {
            **EXTENSION_TYPES,
            **THOUGHT_TYPES,
            "reasoning": ResponseReasoningParam,
            "model": str,
            "input": Union[str, list[InputItem]],  # noqa: UP007
            "tools": list[FunctionTool],
            "tool_choice": Union[Literal["none", "auto", "required"], ToolChoiceFunctionParam, ToolChoiceAllowedParam],  # noqa: UP007
            "text": TextConfig,
            "stream_options": StreamOptions,
            "presence_penalty": float,
            "frequency_penalty": float,
            "seed": int,
            "stop": Union[str, list[str]],  # noqa: UP007
        },
        required=("model", "input"),  # the openai package leaves all fields optional
    )


RESPONSE = BodyForm("ResponseRequest", RESPONSE_FIELDS, _response_types)


# --- the same chat


def chat_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the same request to /v1/chat/completions. Raises ApiError for what that has no fields for."""
    with_logprobs = LOGPROBS in body.get("include", [])
    _check_include(body, with_logprobs)
    _check_summary(body.get("reasoning", {}))
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


def _check_include(body: Mapping[str, Any], with_logprobs: bool) -> None:
    if other := [name for name in body.get("include", []) if name != LOGPROBS]:
        message = f"include has {other[0]!r}, and responses have no such items here; the only one is {LOGPROBS!r}"
        raise ApiError(400, message, "include", "unsupported_parameter")
    if body.get("top_logprobs") and not with_logprobs:
        raise ApiError(400, f'top_logprobs needs include: ["{LOGPROBS}"]; set both', "top_logprobs")
    if (verbosity := body.get("text", {}).get("verbosity") or "medium") != "medium":
        message = f"text.verbosity is {verbosity!r} and cannot be set here; ask for it in a message, and leave it out"
        raise ApiError(400, message, "text.verbosity", "unsupported_parameter")


def _check_summary(reasoning: Mapping[str, Any]) -> None:
    for name in ("summary", "generate_summary"):
        if reasoning.get(name) is not None:
            message = f"reasoning.{name} is not supported: items have the thoughts themselves; leave it out"
            raise ApiError(400, message, f"reasoning.{name}", "unsupported_parameter")


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
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "tool", "content": _text(item["output"]), "tool_call_id": item["call_id"]})
    return messages


def _is_thoughts(message: Mapping[str, Any]) -> bool:
    """Whether ``message`` has nothing but thoughts."""
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
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
