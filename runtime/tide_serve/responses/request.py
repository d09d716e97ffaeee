"""A request to /v1/responses as one to /v1/chat/completions, which asks the engine for the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tide_serve.chat import ChatRequest
from tide_serve.chat import checked as checked_chat
from tide_serve.errors import ApiError
from tide_serve.responses.input_items import chat_messages
from tide_serve.service import Service

_LOGPROBS = "message.output_text.logprobs"
_SAME = (
    "model", "stream", "stream_options", "temperature", "top_p", "top_logprobs", "parallel_tool_calls", "top_k", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "ignore_eos", "depth_policy",
    "cache_salt",
)  # fmt: skip
# Field of a chat → the same of a response; the first that fits.
_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}


@dataclass(frozen=True)
class ResponseRequest:
    """A checked request.

    Args:
        body: as it was sent, for the fields that a response repeats.
        chat: what the engine is asked for.
    """

    body: dict[str, Any]
    chat: ChatRequest


async def checked(service: Service, body: dict[str, Any]) -> ResponseRequest:
    """The request of a ``body`` whose fields and types are right. Raises ApiError for what cannot be done."""
    with_logprobs = _LOGPROBS in body.get("include", [])
    _check_include(body, with_logprobs)
    with _own_names():
        chat = await checked_chat(service, _chat_body(body, with_logprobs))
    if with_logprobs and chat.tools.tools:
        message = f"include: {_LOGPROBS} cannot be given beside tools, whose calls are tokens too; leave out one of them"
        raise ApiError(400, message, "include", "unsupported_parameter")
    return ResponseRequest(body, chat)


def _check_include(body: Mapping[str, Any], with_logprobs: bool) -> None:
    if other := [name for name in body.get("include", []) if name != _LOGPROBS]:
        message = f"include has {other[0]!r}, and responses have no such items here; the only one is {_LOGPROBS!r}"
        raise ApiError(400, message, "include", "unsupported_parameter")
    if body.get("top_logprobs") and not with_logprobs:
        raise ApiError(400, f'top_logprobs needs include: ["{_LOGPROBS}"]; set both', "top_logprobs")
    if (verbosity := body.get("text", {}).get("verbosity") or "medium") != "medium":
        message = f"text.verbosity is {verbosity!r} and cannot be set here; ask for it in a message, and leave it out"
        raise ApiError(400, message, "text.verbosity", "unsupported_parameter")


def _chat_body(body: Mapping[str, Any], with_logprobs: bool) -> dict[str, Any]:
    chat = {name: body[name] for name in _SAME if name in body}
    chat |= {"messages": chat_messages(body["input"], body.get("instructions")), "logprobs": with_logprobs}
    if "max_output_tokens" in body:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if "tools" in body:
        chat["tools"] = [_chat_tool(tool) for tool in body["tools"]]
    if "tool_choice" in body:
        chat["tool_choice"] = _chat_choice(body["tool_choice"])
    if (form := body.get("text", {}).get("format")) is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": form} if form["type"] == "json_schema" else form
    return chat


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _chat_choice(choice: str | Mapping[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    if choice["type"] == "function":
        return {"type": "function", "function": {"name": choice["name"]}}
    allowed = [{"type": "function", "function": {"name": tool.get("name")}} for tool in choice["tools"]]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": allowed}}


@contextmanager
def _own_names() -> Iterator[None]:
    """Errors raised inside name the fields of a response in place of those of a chat."""
    try:
        yield
    except ApiError as error:
        if error.param is None:
            raise
        name = _own_name(error.param)
        message = error.message.replace(error.param, name, 1)
        raise ApiError(error.status, message, name, error.code, error.retry_after) from error


def _own_name(param: str) -> str:
    for chat, own in _NAMES.items():
        if param == chat or param.startswith(f"{chat}."):
            return own + param[len(chat) :]
    return param.replace(".function.", ".")
