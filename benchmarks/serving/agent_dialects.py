"""Two dialects of the same conversation, as clients of OpenAI's chat completions and of Anthropic's messages hold it, streamed.

A conversation sends the whole history with each turn and appends the answer as it came, as an agent does. What follows an answer
with a call goes to the model as the call's result.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, ClassVar

from tide_bench.arms.process import ArmError

from benchmarks.serving.agent_script import Turn
from benchmarks.serving.http_server import event_lines


@dataclass
class Call:
    """``arguments``: JSON."""

    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class Answer:
    """An answer as its events brought it.

    Args:
        cached_tokens: of the prompt's, those that were not computed again.
        seconds: from sending the request to the end of the answer.
        first_text_s: to the first text; None: the answer is a call.
    """

    text: str = ""
    calls: list[Call] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    first_text_s: float | None = None


class Conversation(ABC):
    """A chat with the server at ``address`` (host and port), greedy.

    Args:
        tools: as `agent_script.tools` returns them.
    """

    path: ClassVar[str]

    def __init__(self, address: str, model: str, system: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self._address, self._model, self._system, self._tools = address, model, system, tools
        self._history: list[dict[str, Any]] = []
        self._before = Answer()

    def ask(self, turn: Turn) -> Answer:
        """Raises ArmError where the server refuses the request or ends the answer with an error."""
        self._history.append(self._input(turn.text, self._before.calls))
        answer, began = Answer(), perf_counter()
        for line in event_lines(self._address, self.path, self._body(turn), f"the server at {self._address}"):
            event = json.loads(line)
            if "error" in event:
                raise ArmError(f"the server at {self._address} ended an answer: {event['error']}")
            if self._take(event, answer) and answer.first_text_s is None:
                answer.first_text_s = perf_counter() - began
        answer.seconds = perf_counter() - began
        _cut_calls_as_text(answer)
        if turn.must_call and not answer.calls:
            raise ArmError(f"the server at {self._address} answered {answer.text!r:.200} where a call was required")
        self._history.append(self._output(answer))
        self._before = answer
        return answer

    @abstractmethod
    def _body(self, turn: Turn) -> dict[str, Any]: ...

    @abstractmethod
    def _input(self, text: str, calls: Sequence[Call]) -> dict[str, Any]:
        """The message with ``text``, which is the result of the ``calls`` before it."""

    @abstractmethod
    def _output(self, answer: Answer) -> dict[str, Any]: ...

    @abstractmethod
    def _take(self, event: Mapping[str, Any], answer: Answer) -> bool:
        """Add what ``event`` brings to ``answer``. Returns whether it is text."""


class ChatCompletions(Conversation):
    path = "/v1/chat/completions"

    def _body(self, turn: Turn) -> dict[str, Any]:
        functions = [{"name": t["name"], "description": t["description"], "parameters": t["schema"]} for t in self._tools]
        return {
            "model": self._model,
            "messages": [{"role": "system", "content": self._system}, *self._history],
            "tools": [{"type": "function", "function": function} for function in functions],
            "tool_choice": "required" if turn.must_call else "auto",
            "parallel_tool_calls": False,
            "max_tokens": turn.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _input(self, text: str, calls: Sequence[Call]) -> dict[str, Any]:
        if calls:
            return {"role": "tool", "tool_call_id": calls[0].id, "content": text}
        return {"role": "user", "content": text}

    def _output(self, answer: Answer) -> dict[str, Any]:
        called = [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in answer.calls]
        return {"role": "assistant", "content": answer.text, **({"tool_calls": called} if called else {})}

    def _take(self, event: Mapping[str, Any], answer: Answer) -> bool:
        if usage := event.get("usage"):
            answer.prompt_tokens, answer.new_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        text = ""
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            text += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                if part["index"] == len(answer.calls):
                    answer.calls.append(Call())
                call, function = answer.calls[part["index"]], part.get("function", {})
                call.id = call.id or part.get("id") or ""
                call.name += function.get("name") or ""
                call.arguments += function.get("arguments") or ""
        answer.text += text
        return bool(text)


class Messages(Conversation):
    path = "/v1/messages"

    def _body(self, turn: Turn) -> dict[str, Any]:
        return {
            "model": self._model,
            "system": self._system,
            "messages": self._history,
            "tools": [{"name": t["name"], "description": t["description"], "input_schema": t["schema"]} for t in self._tools],
            "tool_choice": {"type": "any" if turn.must_call else "auto", "disable_parallel_tool_use": True},
            "max_tokens": turn.max_tokens,
            "temperature": 0,
            "stream": True,
        }

    def _input(self, text: str, calls: Sequence[Call]) -> dict[str, Any]:
        if calls:
            return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": calls[0].id, "content": text}]}
        return {"role": "user", "content": text}

    def _output(self, answer: Answer) -> dict[str, Any]:
        blocks = [{"type": "text", "text": answer.text}] if answer.text else []
        called = [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments or "{}")}
            for call in answer.calls
        ]
        return {"role": "assistant", "content": [*blocks, *called]}

    def _take(self, event: Mapping[str, Any], answer: Answer) -> bool:
        for usage in _usages(event):
            answer.new_tokens = usage.get("output_tokens") or answer.new_tokens
            if usage.get("input_tokens") is not None:  # input_tokens are those beside the cached ones
                answer.cached_tokens = usage.get("cache_read_input_tokens") or 0
                answer.prompt_tokens = usage["input_tokens"] + answer.cached_tokens
        block, delta = event.get("content_block", {}), event.get("delta", {})
        if block.get("type") == "tool_use":
            answer.calls.append(Call(block["id"], block["name"]))
        if "partial_json" in delta:
            answer.calls[-1].arguments += delta["partial_json"]
        text = block.get("text", "") + delta.get("text", "")
        answer.text += text
        return bool(text)


def _cut_calls_as_text(answer: Answer) -> None:
    """A call that the limit of tokens has cut off cannot be carried out: the agent takes it for text."""
    for call in [call for call in answer.calls if not _is_object(call.arguments)]:
        answer.calls.remove(call)
        answer.text += f"{call.name} {call.arguments}"


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except ValueError:
        return False


def _usages(event: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for holder in (event, event.get("message", {})):
        if usage := holder.get("usage"):
            yield usage


DIALECTS: dict[str, type[Conversation]] = {"chat": ChatCompletions, "messages": Messages}
