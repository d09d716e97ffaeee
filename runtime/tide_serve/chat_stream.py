"""The events of a streamed chat completion."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from tide_runtime import Chunk, Generation

from tide_serve.answers import AnswerHead, finish_reason
from tide_serve.choice_events import ChoiceEvents
from tide_serve.event_stream import quoted
from tide_serve.logprobs import chat_logprobs
from tide_serve.running import Running
from tide_serve.service import Service
from tide_serve.stream_options import StreamOptions
from tide_serve.tool_calls import ToolCall, ToolCallParser
from tide_serve.tools import ToolPlan


class ChatStream(ChoiceEvents):
    """Each choice has a first event with its role, events with text or whole tool calls, and a last one with its finish_reason.

    ``tools``: which may be called.
    """

    def __init__(
        self, service: Service, head: AnswerHead, options: StreamOptions, tools: ToolPlan, top_logprobs: int | None
    ) -> None:
        super().__init__(service, head, "chat.completion.chunk", options, top_logprobs)
        self._tools = tools
        self._parsers: dict[int, ToolCallParser] = {}
        self._begun: set[int] = set()

    async def events(self, running: Running, n: int) -> AsyncGenerator[str]:
        """Events of all ``n`` choices, those that are there together in one string."""
        finished: dict[int, Generation] = {}
        async with aclosing(running.chunks()) as chunks:
            async for arrived in chunks:
                events = self._of_batch(arrived)
                finished |= {choice: chunk.generation for choice, chunk in arrived if chunk.generation is not None}
                if len(finished) == n:
                    events += self._ending([finished[choice] for choice in range(n)], n)
                if events:
                    yield events

    def _of_choice(self, choice: int, chunks: Sequence[Chunk]) -> str:
        events = ""
        if choice not in self._begun:
            self._begun.add(choice)
            events = self._event(choice, '{"role": "assistant", "content": ""}')
        text, last = "".join([chunk.text for chunk in chunks]), chunks[-1].generation
        calls: list[ToolCall] = []
        if self._tools.tools:
            text, calls = self._split(choice, text, last is not None)
        if text or self._top is not None or self._options.include_depth:
            events += self._event(choice, f'{{"content": {quoted(text)}}}', chunks)
        if calls:
            events += self._event(choice, quoted({"tool_calls": self._deltas(choice, calls)}))
        if last is not None:
            events += self._event(choice, "{}", reason=quoted(self._reason(choice, last)))
        return events

    def _event(self, choice: int, delta: str, chunks: Sequence[Chunk] = (), reason: str = "null") -> str:
        logprobs, depths = "null", self._depths(chunks) if chunks else ""
        if chunks and self._top is not None:
            entries = [chunk.logprob for chunk in chunks if chunk.logprob is not None]
            logprobs = quoted(chat_logprobs(entries, self._top, self._service.token_texts))
        fields = f'{choice}, "delta": {delta}, "logprobs": {logprobs}, "finish_reason": {reason}{depths}'
        return f"{self._before}{fields}{self._behind}"

    def _split(self, choice: int, text: str, last: bool) -> tuple[str, list[ToolCall]]:
        if (parser := self._parsers.get(choice) or self._tools.parser()) is None:
            return text, []
        self._parsers[choice] = parser
        shown, calls = parser.feed(text)
        if last:
            rest, more = parser.finish()
            return shown + rest, calls + more
        return shown, calls

    def _deltas(self, choice: int, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        first = len(self._parsers[choice].calls) - len(calls)
        return [{"index": first + number, **call.body()} for number, call in enumerate(calls)]

    def _reason(self, choice: int, generation: Generation) -> str:
        reason = finish_reason(generation.finish_reason)
        called = choice in self._parsers and self._parsers[choice].calls
        return "tool_calls" if called and reason == "stop" else reason
