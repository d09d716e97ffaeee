"""The events of a streamed response, in the order of OpenAI's API: it begins, its items open, grow and close, and it ends.

Deltas of text are written once for each token of every client, and put together from strings for that reason.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from tide_runtime import Chunk, Generation, TideError

from tide_serve.errors import ApiError, api_error
from tide_serve.event_stream import quoted
from tide_serve.logprobs import chat_logprobs
from tide_serve.responses.request import ResponseRequest
from tide_serve.responses.response_object import (
    OutputItem,
    call_item,
    failed,
    finished,
    is_cut_off,
    item_id,
    message_item,
    unfinished,
)
from tide_serve.running import Running
from tide_serve.service import Service
from tide_serve.tool_calls import ToolCall

_log = logging.getLogger("tide_serve")


class ResponseEvents:
    """Writes the chunks of one generation as events, and collects the items that they make up."""

    def __init__(self, service: Service, asked: ResponseRequest) -> None:
        self._service, self._asked = service, asked
        self._parser = asked.chat.tools.parser()
        self._output: list[OutputItem] = []
        self._message: _OpenMessage | None = None
        self._number = -1

    async def events(self, running: Running) -> AsyncGenerator[str]:
        """All events, those that are there together in one string. An error before the first of them is raised."""
        begun = False
        try:
            async with aclosing(running.chunks()) as chunks:
                async for arrived in chunks:
                    events = ("" if begun else self._begin()) + self._add([chunk for _, chunk in arrived])
                    begun = True
                    if events:
                        yield events
        except (TideError, ApiError) as error:
            if not begun:
                raise
            yield self._fail(error)
        except Exception as error:
            if not begun:
                raise
            _log.exception("a stream failed")
            yield self._fail(error)

    def _begin(self) -> str:
        response = unfinished(self._asked)
        return "".join(self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress"))

    def _add(self, chunks: Sequence[Chunk]) -> str:
        text, last = "".join([chunk.text for chunk in chunks]), chunks[-1].generation
        calls: list[ToolCall] = []
        if self._parser is not None:
            text, calls = self._parser.feed(text)
            if last is not None:
                rest, more = self._parser.finish()
                text, calls = text + rest, calls + more
        entries: list[dict[str, Any]] = []
        if (top := self._asked.chat.top_logprobs) is not None:
            scored = [chunk.logprob for chunk in chunks if chunk.logprob is not None]
            entries = chat_logprobs(scored, top, self._service.token_texts)["content"]
        events = self._text(text, entries) if text or entries else ""
        for call in calls:
            events += self._close("completed") + self._call(call)
        return events if last is None else events + self._end(last)

    def _text(self, text: str, entries: list[dict[str, Any]]) -> str:
        events = self._open() if self._message is None else ""
        assert self._message is not None
        message, self._number = self._message, self._number + 1
        message.texts.append(text)
        message.logprobs += entries
        return (
            f'{events}event: response.output_text.delta\ndata: {{"type": "response.output_text.delta", "sequence_number": '
            f'{self._number}, {message.place}, "delta": {quoted(text)}, "logprobs": {quoted(entries)}}}\n\n'
        )

    def _open(self) -> str:
        message = self._message = _OpenMessage(item_id("msg"), len(self._output))
        item = message_item(message.id, "", [], "in_progress")
        part = item.content[0].model_dump(mode="json")
        events = self._event("response.output_item.added", output_index=message.index, item=_dumped(item) | {"content": []})
        return events + self._event("response.content_part.added", **message.where, part=part)

    def _close(self, status: str) -> str:
        """Close the message that is open, if one is."""
        if self._message is None:
            return ""
        message, self._message = self._message, None
        text = "".join(message.texts)
        item = message_item(message.id, text, message.logprobs, status)
        self._output.append(item)
        dumped = _dumped(item)
        events = self._event("response.output_text.done", **message.where, text=text, logprobs=message.logprobs)
        events += self._event("response.content_part.done", **message.where, part=dumped["content"][0])
        return events + self._event("response.output_item.done", output_index=message.index, item=dumped)

    def _call(self, call: ToolCall) -> str:
        item, index = call_item(call), len(self._output)
        self._output.append(item)
        where, dumped = {"item_id": item.id, "output_index": index}, _dumped(item)
        begun = {**dumped, "arguments": "", "status": "in_progress"}
        events = self._event("response.output_item.added", output_index=index, item=begun)
        events += self._event("response.function_call_arguments.delta", **where, delta=call.arguments)
        events += self._event("response.function_call_arguments.done", **where, name=call.name, arguments=call.arguments)
        return events + self._event("response.output_item.done", output_index=index, item=dumped)

    def _end(self, generation: Generation) -> str:
        events = "" if self._message is not None or self._output else self._open()  # an empty answer is a message too
        events += self._close("incomplete" if is_cut_off(generation) else "completed")
        response = finished(self._service.engine, self._asked, self._output, generation)
        return events + self._event(f"response.{response['status']}", response=response)

    def _fail(self, error: Exception) -> str:
        events = self._close("incomplete")
        return events + self._event("response.failed", response=failed(self._asked, self._output, api_error(error)))

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return f"event: {kind}\ndata: {quoted({'type': kind, 'sequence_number': self._number, **fields})}\n\n"


class _OpenMessage:
    """A message item that grows."""

    def __init__(self, message_id: str, index: int) -> None:
        self.id, self.index = message_id, index
        self.where: dict[str, Any] = {"item_id": message_id, "output_index": index, "content_index": 0}
        self.place = quoted(self.where)[1:-1]
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []


def _dumped(item: OutputItem) -> dict[str, Any]:
    return item.model_dump(mode="json")
