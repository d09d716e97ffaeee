"""The response object and its output items, as types of the openai package."""

from __future__ import annotations

from collections.abc import Sequence
from time import time
from typing import Any
from uuid import uuid4

from openai.types.responses import (
    Response,
    ResponseError,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseUsage,
)
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_output_text import Logprob
from tide_runtime import Engine, Generation

from tide_serve.answers import finish_reason
from tide_serve.errors import ApiError
from tide_serve.responses.request import ResponseRequest
from tide_serve.tool_calls import ToolCall
from tide_serve.usage import usage_of

OutputItem = ResponseOutputMessage | ResponseFunctionToolCall


def message_item(item_id: str, text: str, logprobs: Sequence[dict[str, Any]], status: Any) -> ResponseOutputMessage:
    """An answer's text. ``logprobs``: of its tokens, as `tide_serve.logprobs.chat_logprobs` gives them."""
    entries = [Logprob.model_validate(entry) for entry in logprobs]
    part = ResponseOutputText(type="output_text", text=text, annotations=[], logprobs=entries)
    return ResponseOutputMessage(id=item_id, type="message", role="assistant", status=status, content=[part])


def call_item(call: ToolCall) -> ResponseFunctionToolCall:
    """A call of a function."""
    return ResponseFunctionToolCall(
        id=item_id("fc"), type="function_call", call_id=call.id, name=call.name, arguments=call.arguments, status="completed"
    )


def item_id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"


def unfinished(asked: ResponseRequest) -> dict[str, Any]:
    """The response while it is generated."""
    return _response(asked, [], status="in_progress")


def finished(engine: Engine, asked: ResponseRequest, output: Sequence[OutputItem], generation: Generation) -> dict[str, Any]:
    """The response of a ``generation`` that has ended."""
    usage = _usage(engine, generation)
    if is_cut_off(generation):
        details = IncompleteDetails(reason="max_output_tokens")
        return _response(asked, output, status="incomplete", incomplete_details=details, usage=usage)
    return _response(asked, output, status="completed", completed_at=int(time()), usage=usage)


def failed(asked: ResponseRequest, output: Sequence[OutputItem], error: ApiError) -> dict[str, Any]:
    """The response whose generation ended with ``error``."""
    return _response(asked, output, status="failed", error=ResponseError(code="server_error", message=error.message))


def is_cut_off(generation: Generation) -> bool:
    """Whether a limit of tokens, of the context or of time has ended the text."""
    return finish_reason(generation.finish_reason) == "length"


def _response(asked: ResponseRequest, output: Sequence[OutputItem], **state: Any) -> dict[str, Any]:
    body, chat = asked.body, asked.chat
    text, repeated = body.get("text", {}), ("instructions", "max_output_tokens", "user", "safety_identifier", "prompt_cache_key")
    response = Response.construct(
        id=f"resp_{chat.head.id.rpartition('-')[2]}",
        object="response",
        created_at=chat.head.created,
        model=chat.head.model,
        output=list(output),
        background=False,
        metadata=body.get("metadata", {}),
        parallel_tool_calls=body.get("parallel_tool_calls", True),
        service_tier="default",
        store=False,
        temperature=chat.params.temperature,
        text={"format": {"type": "text"}, "verbosity": "medium"} | text,
        tool_choice=body.get("tool_choice", "auto"),
        tools=[{"strict": False, "parameters": None, "description": None} | tool for tool in body.get("tools", [])],
        top_logprobs=chat.top_logprobs or 0,
        top_p=chat.params.top_p,
        truncation="disabled",
        **{name: body.get(name) for name in repeated},
        **state,
    )
    return response.model_dump(mode="json", by_alias=True, warnings=False)  # of formats that only this server has


def _usage(engine: Engine, generation: Generation) -> ResponseUsage:
    usage = usage_of(engine, [generation])
    return ResponseUsage.model_validate(
        {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
            "depth": usage["depth"],
        }
    )
