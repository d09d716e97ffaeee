"""``input`` of a response as messages of a chat: text, calls of functions, and what they returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, Union

from openai.types.responses import ResponseOutputRefusalParam
from typing_extensions import TypedDict

Status = Literal["in_progress", "completed", "incomplete"]


class InputText(TypedDict, total=False):
    type: Required[Literal["input_text"]]
    text: Required[str]


class OutputText(TypedDict, total=False):
    """A part of an earlier answer, as it was sent. Its annotations and log-probabilities say nothing to the model."""

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


InputItem = Union[Message, FunctionCall, FunctionCallOutput]  # noqa: UP007


def chat_messages(items: str | Sequence[Mapping[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Messages of /v1/chat/completions that say the same; ``instructions`` come first, as those of the system.

    Calls follow each other in one message, behind the text that the assistant wrote before them.
    """
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item["role"], "content": _text(item["content"])})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(_call(item))
        else:
            messages.append({"role": "tool", "content": _text(item["output"]), "tool_call_id": item["call_id"]})
    return messages


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}
