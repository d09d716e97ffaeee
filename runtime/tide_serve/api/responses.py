"""POST /v1/responses: OpenAI's Responses API for text.

Fields are those of OpenAI's API (`request.responses_as_chat.ResponseBody`). Extensions are those of /v1/chat/completions,
with ``text.format`` in place of ``response_format``, and without ``include_depth``. ``usage`` has ``depth`` (see
`tide_serve.api.answer_fields`). Thoughts are items of type ``reasoning``, with the text and without a summary.

Nothing is stored: an id cannot be given to later requests, and ``store`` is false in every response. Tools are functions, and are
strict where ``strict`` is true. A response that the server's time limit ends is incomplete for the reason "max_output_tokens".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import time
from typing import Any, Literal
from uuid import uuid4

from fastapi import Request, Response
from openai.types.responses import Response as ResponseObject
from starlette.types import Scope
from tide_runtime import Chunk, Engine, Generation
from tide_runtime.sampler import TokenLogprob

from tide_serve.api.answer_fields import finish_reason, usage_of
from tide_serve.api.chat import ChatRequest
from tide_serve.api.chat import checked as checked_chat
from tide_serve.api.event_stream import ItemStream, named_event, quoted, respond
from tide_serve.api.logprobs import chat_logprobs
from tide_serve.api.service import ServedModel
from tide_serve.errors import ApiError, fields_named
from tide_serve.request.call_formats import ToolCall
from tide_serve.request.responses_as_chat import LOGPROBS, chat_body, response_field

_TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}  # kind of an item → type of its parts
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_REPEATED = ("instructions", "max_output_tokens", "user", "safety_identifier", "prompt_cache_key", "reasoning")
Body = dict[str, Any]
Item = dict[str, Any]
ItemKind = Literal["message", "reasoning"]


async def answer_response(model: ServedModel, request: Request, body: Body) -> Response:
    chat = await checked(model, body)
    stream = ResponseStream(model, body, chat) if chat.stream is not None else None
    return await respond(model, request, chat.jobs, stream, partial(_answer, model, body, chat))


async def checked(model: ServedModel, body: dict[str, Any]) -> ChatRequest:
    """The chat of a ``body`` whose fields and types are right. Raises ApiError or ParamsError for what cannot be done."""
    as_chat = chat_body(body)
    with fields_named(response_field):
        chat = await checked_chat(model, as_chat)
    if as_chat["logprobs"] and (chat.tools.tools or chat.thoughts.thoughts is not None):
        other = "tools, whose calls" if chat.tools.tools else "thoughts, which"
        message = f"include: {LOGPROBS} cannot be given together with {other} are tokens too; leave out one of them"
        raise ApiError(400, message, "include", "unsupported_parameter")
    return chat


def _answer(model: ServedModel, body: Body, chat: ChatRequest, generations: Sequence[Generation]) -> dict[str, Any]:
    [generation] = generations
    thoughts, text, calls = chat.parser().feed(generation.text or "", last=True)
    logprobs = _logprobs(model, chat, generation.logprobs)
    output = [_item("reasoning", _item_id("reasoning"), thoughts, "completed")] if thoughts else []
    if text or not calls:
        output.append(_item("message", _item_id("message"), text, _last_status(generation), logprobs))
    output += [_call_item(call) for call in calls]
    return _finished(model.engine, body, chat, output, generation)


def _logprobs(model: ServedModel, chat: ChatRequest, entries: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [] if chat.top_logprobs is None else chat_logprobs(entries, chat.top_logprobs, model.token_texts)["content"]


# --- events


class ResponseStream(ItemStream):
    """The events of OpenAI's Responses API. Their items are collected, as the last event has all of them."""

    def __init__(self, model: ServedModel, body: Body, chat: ChatRequest) -> None:
        super().__init__(chat.parser())
        self._model = model
        self._body = body
        self._chat = chat
        self._output: list[Item] = []
        self._item: _OpenItem | None = None
        self._number = -1

    def _begin(self) -> str:
        response = _response_object(self._body, self._chat, [], status="in_progress")
        return "".join(self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress"))

    def _add(self, chunks: Sequence[Chunk]) -> str:
        thoughts, text, calls = self._parser.read(chunks)
        scored = [chunk.logprob for chunk in chunks if chunk.logprob is not None]
        entries = _logprobs(self._model, self._chat, scored)
        events = self._grow("reasoning", thoughts, []) if thoughts else ""
        events += self._grow("message", text, entries) if text or entries else ""
        for call in calls:
            events += self._close("completed") + self._call(call)
        return events

    def _grow(self, kind: ItemKind, text: str, entries: list[dict[str, Any]]) -> str:
        events = "" if self._item is not None and self._item.kind == kind else self._close("completed") + self._open(kind)
        assert self._item is not None
        item = self._item
        self._number = self._number + 1
        item.texts.append(text)
        item.logprobs += entries
        logprobs = f', "logprobs": {quoted(entries)}' if kind == "message" else ""
        return (
            f'{events}event: {item.event}.delta\ndata: {{"type": "{item.event}.delta", "sequence_number": '
            f'{self._number}, {item.json_fields}, "delta": {quoted(text)}{logprobs}}}\n\n'
        )

    def _open(self, kind: ItemKind) -> str:
        item = self._item = _OpenItem(kind, len(self._output))
        begun = item.as_output("in_progress")
        [part] = begun["content"]
        events = self._event("response.output_item.added", output_index=item.index, item=begun | {"content": []})
        return events + self._event("response.content_part.added", **item.fields, part=part)

    def _close(self, status: str) -> str:
        """Close the message, or the thoughts, that are open, if any are."""
        if self._item is None:
            return ""
        item = self._item
        self._item = None
        self._output.append(closed := item.as_output(status))
        [part] = closed["content"]
        logprobs = {"logprobs": item.logprobs} if item.kind == "message" else {}
        events = self._event(f"{item.event}.done", **item.fields, text=part["text"], **logprobs)
        events += self._event("response.content_part.done", **item.fields, part=part)
        return events + self._event("response.output_item.done", output_index=item.index, item=closed)

    def _call(self, call: ToolCall) -> str:
        item = _call_item(call)
        index = len(self._output)
        self._output.append(item)
        where, begun = {"item_id": item["id"], "output_index": index}, {**item, "arguments": "", "status": "in_progress"}
        events = self._event("response.output_item.added", output_index=index, item=begun)
        events += self._event("response.function_call_arguments.delta", **where, delta=call.arguments)
        events += self._event("response.function_call_arguments.done", **where, name=call.name, arguments=call.arguments)
        return events + self._event("response.output_item.done", output_index=index, item=item)

    def _end(self, generation: Generation) -> str:
        events = ""
        if not self._parser.calls and (self._item is None or self._item.kind == "reasoning"):  # an empty answer is a message too
            events = self._close("completed") + self._open("message")
        events += self._close(_last_status(generation))
        response = _finished(self._model.engine, self._body, self._chat, self._output, generation)
        return events + self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError, scope: Scope) -> str:
        events = self._close("incomplete")
        details = {"code": "server_error", "message": error.message}
        response = _response_object(self._body, self._chat, self._output, status="failed", error=details)
        return events + self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return named_event(kind, sequence_number=self._number, **fields)


class _OpenItem:
    """An item that grows: a message, or thoughts.

    ``event``: the type of its events, ``fields``: those of all of them, and ``json_fields`` the same as JSON without braces.
    """

    def __init__(self, kind: ItemKind, index: int) -> None:
        self.kind, self.index = kind, index
        self.event = f"response.{_TEXTS[kind]}"
        self.fields: dict[str, Any] = {"item_id": _item_id(kind), "output_index": index, "content_index": 0}
        self.json_fields = quoted(self.fields)[1:-1]
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []

    def as_output(self, status: str) -> Item:
        """The item as it is now."""
        return _item(self.kind, self.fields["item_id"], "".join(self.texts), status, self.logprobs)


# --- objects


def _item(kind: ItemKind, item_id: str, text: str, status: str, logprobs: Sequence[dict[str, Any]] = ()) -> Item:
    """An answer's text, or its thoughts. ``logprobs``: one entry for each token of a text, as `chat_logprobs` gives them."""
    part: dict[str, Any] = {"type": _TEXTS[kind], "text": text}
    if kind == "reasoning":
        return {"id": item_id, "type": kind, "summary": [], "content": [part], "status": status}
    part |= {"annotations": [], "logprobs": [*logprobs]}
    return {"id": item_id, "type": kind, "role": "assistant", "status": status, "content": [part]}


def _call_item(call: ToolCall) -> Item:
    fields = {"call_id": call.id, "name": call.name, "arguments": call.arguments, "status": "completed"}
    return {"id": _item_id("function_call"), "type": "function_call", **fields}


def _item_id(kind: str) -> str:
    return f"{_IDS[kind]}_{uuid4().hex}"


def _last_status(generation: Generation) -> str:
    """What becomes of the last item, and of the response. A limit of tokens, of the context or of time cuts both off."""
    return "incomplete" if finish_reason(generation.finish_reason) == "length" else "completed"


def _finished(engine: Engine, body: Body, chat: ChatRequest, output: Sequence[Item], generation: Generation) -> dict[str, Any]:
    """The response of a ``generation`` that has ended."""
    status = _last_status(generation)
    cut_off = status == "incomplete"
    ending = {"incomplete_details": {"reason": "max_output_tokens"}} if cut_off else {"completed_at": int(time())}
    return _response_object(body, chat, output, status=status, usage=_usage(engine, generation), **ending)


def _response_object(body: Body, chat: ChatRequest, output: Sequence[Item], **state: Any) -> dict[str, Any]:
    """The response to the request of ``body``, some of whose fields it repeats."""
    tools = [tool for tool in body.get("tools", []) if tool["type"] == "function"]
    return {
        **dict.fromkeys(ResponseObject.model_fields),
        "id": f"resp_{chat.head['id'].rpartition('-')[2]}",
        "object": "response",
        "created_at": chat.head["created"],
        "model": chat.head["model"],
        "output": [*output],
        "background": False,
        "metadata": body.get("metadata", {}),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "service_tier": "default",
        "store": False,
        "temperature": chat.params.temperature,
        "text": {"format": {"type": "text"}, "verbosity": "medium"} | body.get("text", {}),
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": [{"strict": False, "parameters": None, "description": None} | tool for tool in tools],
        "top_logprobs": chat.top_logprobs or 0,
        "top_p": chat.params.top_p,
        "truncation": "disabled",
        **{name: body.get(name) for name in _REPEATED},
        **state,
    }


def _usage(engine: Engine, generation: Generation) -> dict[str, Any]:
    usage = usage_of(engine, [generation])
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
        "depth": usage["depth"],
    }
