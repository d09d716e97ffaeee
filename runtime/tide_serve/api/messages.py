"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API for text.

Fields are those of Anthropic's API (`request.messages_as_chat.MessageBody`). Extensions are those of /v1/chat/completions, with
``output_config.format`` in place of ``response_format``. ``usage`` has ``depth`` (see `tide_serve.api.answer_fields`).
``input_tokens`` are those that were computed, ``cache_read_input_tokens`` those that were not; the first event of a stream,
which comes before that is known, counts all of them as computed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from tide_runtime import Chunk, Engine, Generation

from tide_serve.api.answer_fields import usage_of
from tide_serve.api.chat import ChatRequest
from tide_serve.api.chat import checked as checked_chat
from tide_serve.api.event_stream import ItemStream, named_event, quoted, respond
from tide_serve.api.service import ServedModel
from tide_serve.errors import fields_named
from tide_serve.request.call_formats import ToolCall
from tide_serve.request.messages_as_chat import chat_body, message_field
from tide_serve.request.prompt_ids import chat_prompt
from tide_serve.request.thinking import plan_thoughts
from tide_serve.request.tools import plan_tools

Body = dict[str, Any]


async def answer_message(model: ServedModel, request: Request, body: Body) -> Response:
    chat = await checked(model, body)
    stream = MessageStream(model.engine, chat) if chat.stream is not None else None
    return await respond(model, request, chat.jobs, stream, partial(_answer, model.engine, chat))


async def count_tokens(model: ServedModel, request: Request, body: Body) -> Response:
    with fields_named(message_field):
        chat = chat_body(body)
        tools = plan_tools(chat, model.engine, model.config)
        variables = plan_thoughts(chat, model.engine, bool(tools.tools)).variables
        prompt = await chat_prompt(model.engine, chat["messages"], tools, variables, "continue_final_message" in chat)
    return JSONResponse({"input_tokens": len(prompt.ids)})


async def checked(model: ServedModel, body: Body) -> ChatRequest:
    """The chat of a ``body`` whose fields and types are right. Raises ApiError or ParamsError for what cannot be done."""
    with fields_named(message_field):
        return await checked_chat(model, chat_body(body))


def _answer(engine: Engine, chat: ChatRequest, generations: Sequence[Generation]) -> dict[str, Any]:
    [generation] = generations
    thoughts, text, calls = chat.parser().feed(generation.text or "", last=True)
    content = [_thoughts_block(chat, thoughts)] if thoughts else []
    if text or not (thoughts or calls):  # an empty answer has a block too, so that clients can take its first
        content.append({"type": "text", "text": text})
    content += [_call_block(call, call_input(call.arguments)) for call in calls]
    return {**_head(chat), "content": content, **_ending(chat, generation, calls), "usage": _usage(engine, generation)}


def call_input(arguments: str) -> Any:
    """A call's ``arguments`` from their JSON. Halves of surrogate pairs, which UTF-8 cannot hold, become U+FFFD."""
    text = json.dumps(json.loads(arguments), ensure_ascii=False)
    return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))


class MessageStream(ItemStream):
    """The events of Anthropic's API, whose items are blocks."""

    def __init__(self, engine: Engine, chat: ChatRequest) -> None:
        super().__init__(chat.parser())
        self._engine, self._chat = engine, chat
        self._blocks = 0  # that have begun
        self._kind = ""  # of the block that is open; empty: none is

    def _begin(self) -> str:
        usage = {"input_tokens": len(self._chat.ids), "output_tokens": 0}
        usage |= {"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}
        message = {**_head(self._chat), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return named_event("message_start", message=message)

    def _add(self, chunks: Sequence[Chunk]) -> str:
        thoughts, text, calls = self._parser.read(chunks)
        events = self._words("thinking", thoughts) if thoughts else ""
        if text:
            events += self._words("text", text)
        for call in calls:
            events += self._open(_call_block(call, {})) + self._delta("input_json_delta", "partial_json", call.arguments)
        return events

    def _words(self, kind: str, words: str) -> str:
        """``words`` of a block of text or thoughts, in which the field is called as the block."""
        begun = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
        return ("" if self._kind == kind else self._open(begun)) + self._delta(f"{kind}_delta", kind, words)

    def _delta(self, kind: str, field: str, words: str) -> str:
        return (
            f'event: content_block_delta\ndata: {{"type": "content_block_delta", "index": {self._blocks - 1}, '
            f'"delta": {{"type": "{kind}", "{field}": {quoted(words)}}}}}\n\n'
        )

    def _open(self, block: dict[str, Any]) -> str:
        """Begin ``block`` after the end of the one that is open."""
        events = self._close()
        self._blocks = self._blocks + 1
        self._kind = block["type"]
        return events + named_event("content_block_start", index=self._blocks - 1, content_block=block)

    def _close(self) -> str:
        kind = self._kind
        self._kind = ""
        signed = self._delta("signature_delta", "signature", _signature(self._chat)) if kind == "thinking" else ""
        return signed + named_event("content_block_stop", index=self._blocks - 1) if kind else ""

    def _end(self, generation: Generation) -> str:
        events = "" if self._blocks else self._open({"type": "text", "text": ""})
        events += self._close()
        ending = _ending(self._chat, generation, self._parser.calls)
        usage = _usage(self._engine, generation)
        return events + named_event("message_delta", delta=ending, usage=usage) + named_event("message_stop")


def _head(chat: ChatRequest) -> dict[str, Any]:
    message_id = f"msg_{chat.head['id'].rpartition('-')[2]}"
    return {"id": message_id, "type": "message", "role": "assistant", "model": chat.head["model"]}


def _thoughts_block(chat: ChatRequest, thoughts: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": thoughts, "signature": _signature(chat)}


def _signature(chat: ChatRequest) -> str:
    """What clients send back with thoughts, and drop the thoughts where it is empty. Nothing is checked by it here."""
    signature: str = chat.head["system_fingerprint"]
    return signature


def _call_block(call: ToolCall, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{call.id.removeprefix('call_')}", "name": call.name, "input": arguments}


def _ending(chat: ChatRequest, generation: Generation, calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Why the answer ended, in Anthropic's words. One that the server's time limit ends has been cut off, as by max_tokens."""
    reason = "max_tokens"
    sequence = None
    if generation.finish_reason == "cache_full":
        reason = "model_context_window_exceeded"
    elif generation.finish_reason in ("eos", "stop"):
        reason = "tool_use" if calls else "end_turn"
        if not calls and generation.stop_string not in (None, *chat.tools.stops, *chat.thoughts.stops):
            reason = "stop_sequence"
            sequence = generation.stop_string
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(engine: Engine, generation: Generation) -> dict[str, Any]:
    usage = usage_of(engine, [generation])
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "depth": usage["depth"],
    }
