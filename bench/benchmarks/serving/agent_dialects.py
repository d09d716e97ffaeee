"""Two dialects of the same conversation, as clients of OpenAI's chat completions and of Anthropic's messages hold it, streamed.

A conversation sends the whole history with each turn and appends the answer as it came, as an agent does.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar

from tide_bench.arms.process import ArmError

from benchmarks.serving.agent_script import Turn
from benchmarks.serving.http_server import event_lines


@dataclass
class Answer:
    """An answer as its events brought it.

    Args:
        cached_tokens: of the prompt's, those that were not computed again.
        seconds: from sending the request to the end of the answer; ``first_s``: to its first text.
    """

    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    first_s: float = 0.0


class Conversation(ABC):
    """A chat with the server at ``address`` (host and port), greedy."""

    path: ClassVar[str]

    def __init__(self, address: str, model: str, system: str) -> None:
        self._address = address
        self._model = model
        self._system = system
        self._history: list[dict[str, str]] = []

    def ask(self, turn: Turn) -> Answer:
        """Raises ArmError where the server refuses the request, ends the answer with an error, or says nothing."""
        self._history.append({"role": "user", "content": turn.text})
        body = {"model": self._model, "max_tokens": turn.max_tokens, "temperature": 0, "stream": True, **self._body(turn)}
        answer = Answer()
        began = perf_counter()
        for line in event_lines(self._address, self.path, body, f"the server at {self._address}"):
            event = json.loads(line)
            if "error" in event:
                raise ArmError(f"the server at {self._address} ended an answer: {event['error']}")
            text = self._take(event, answer)
            if text and not answer.text:
                answer.first_s = perf_counter() - began
            answer.text += text
        answer.seconds = perf_counter() - began
        if not answer.text or not answer.prompt_tokens:
            raise ArmError(f"the server at {self._address} answered {turn.text!r:.80} with no text, or without its usage")
        self._history.append({"role": "assistant", "content": answer.text})
        return answer

    @abstractmethod
    def _body(self, turn: Turn) -> dict[str, Any]:
        """The fields of the request that the dialects have in forms of their own."""

    @abstractmethod
    def _take(self, event: Mapping[str, Any], answer: Answer) -> str:
        """Note the figures that ``event`` brings. Returns its text."""


class ChatCompletions(Conversation):
    """Calls follow their schema."""

    path = "/v1/chat/completions"

    def _body(self, turn: Turn) -> dict[str, Any]:
        body: dict[str, Any] = {"messages": [{"role": "system", "content": self._system}, *self._history]}
        if turn.schema is not None:
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "call", "schema": turn.schema}}
        return body | {"stream_options": {"include_usage": True}}

    def _take(self, event: Mapping[str, Any], answer: Answer) -> str:
        if usage := event.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.new_tokens = usage["completion_tokens"]
            answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


class Messages(Conversation):
    """Calls are text of any form: llama.cpp's server has no schemas in this dialect."""

    path = "/v1/messages"

    def _body(self, turn: Turn) -> dict[str, Any]:
        return {"system": self._system, "messages": self._history}

    def _take(self, event: Mapping[str, Any], answer: Answer) -> str:
        usage = event.get("usage") or event.get("message", {}).get("usage") or {}
        answer.new_tokens = usage.get("output_tokens") or answer.new_tokens
        if usage.get("input_tokens") is not None:  # those beside the cached ones
            answer.cached_tokens = usage.get("cache_read_input_tokens") or 0
            answer.prompt_tokens = usage["input_tokens"] + answer.cached_tokens
        text: str = event.get("content_block", {}).get("text", "") + event.get("delta", {}).get("text", "")
        return text


DIALECTS: dict[str, type[Conversation]] = {"chat": ChatCompletions, "messages": Messages}
