"""POST /v1/chat/completions.

Fields are those of OpenAI's API (`request.fields.ChatBody`). Extensions:

- ``top_k``, ``min_p``, ``repetition_penalty``, ``ignore_eos``, ``cache_salt``: see `tide_runtime.GenerationParams`.
- ``depth_policy``: the engine's own or "auto"; others are refused, as an engine is loaded for one policy.
- ``response_format``: also with a regex or a Lark grammar, see `tide_serve.request.structured`.
- ``continue_final_message``: the answer goes on from the last message, which is the assistant's.
- ``reasoning``, ``chat_template_kwargs``: whether and for how long the model thinks, see `tide_serve.request.thinking`. Its
  thoughts are the ``reasoning_content`` of messages and deltas.
- ``stream_options.include_depth``: the choices of a stream have ``depths``, the layers run for each of the event's tokens.
- ``usage`` has ``depth``, see `tide_serve.api.answer_fields`.

``max_tokens`` and ``max_completion_tokens`` default to the rest of the context. An answer that the server's time limit ends has
``finish_reason`` "length".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import Request, Response
from tide_runtime import Chunk, Generation, GenerationParams
from tide_runtime.sampler import TokenLogprob

from tide_serve.api.answer_fields import answer_head, finish_reason, usage_of
from tide_serve.api.event_stream import ChoiceStream, quoted, respond
from tide_serve.api.logprobs import chat_logprobs
from tide_serve.api.service import ServedModel
from tide_serve.errors import ApiError, fields_named
from tide_serve.request.answer_parser import AnswerParser
from tide_serve.request.call_formats import ToolCall
from tide_serve.request.other_servers import in_openais_terms
from tide_serve.request.parameters import (
    StreamOptions,
    checked_top_logprobs,
    choices,
    generation_params,
    max_new_tokens,
    of_choice,
    stream_options,
)
from tide_serve.request.prompt_ids import chat_prompt
from tide_serve.request.structured import check_grammar, response_grammar
from tide_serve.request.thinking import ThoughtPlan, plan_thoughts
from tide_serve.request.tools import ToolPlan, plan_tools


@dataclass(frozen=True)
class ChatRequest:
    """A checked request.

    Args:
        head: the first fields of its answer (see `answer_head`).
        ids: token ids of the prompt.
        n: choices.
        top_logprobs: None: no log-probabilities.
        thoughts: how its answers think.
        stream: None: the answer is not streamed.
    """

    head: dict[str, Any]
    ids: list[int]
    params: GenerationParams
    n: int
    tools: ToolPlan
    thoughts: ThoughtPlan
    top_logprobs: int | None
    stream: StreamOptions | None

    @property
    def jobs(self) -> list[tuple[Sequence[int], GenerationParams]]:
        return [(self.ids, of_choice(self.params, choice)) for choice in range(self.n)]

    def parser(self) -> AnswerParser:
        """The reader of one of its answers."""
        return AnswerParser(self.thoughts.splitter(), self.tools.parser(), self.thoughts.endings + self.thoughts.special)


async def answer_chat(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    chat = await checked(model, body)
    stream = ChatStream(model, chat, chat.stream) if chat.stream is not None else None
    return await respond(model, request, chat.jobs, stream, partial(_answer, model, chat))


async def checked(model: ServedModel, body: dict[str, Any]) -> ChatRequest:
    """The request of a ``body`` whose fields and types are right. Raises ApiError or ParamsError for what cannot be done."""
    terms, name_of = in_openais_terms(body)
    with fields_named(name_of):
        return await _checked(model, terms)


async def _checked(model: ServedModel, body: dict[str, Any]) -> ChatRequest:
    engine, config = model.engine, model.config
    stream = stream_options(body)
    n = choices(body, config)
    top_logprobs = _top_logprobs(body)
    tools = plan_tools(body, engine, config)
    answer = await response_grammar(engine, body["response_format"], config) if "response_format" in body else None
    if (grammar := tools.grammar(answer)) is not None and grammar is not answer:
        await check_grammar(engine, grammar, "tools")
    thoughts = plan_thoughts(body, engine, bool(tools.tools))
    continues = body.get("continue_final_message", False)
    if body.get("add_generation_prompt", not continues) == continues:
        message = "add_generation_prompt has to be false with continue_final_message, and true without; leave it out"
        raise ApiError(400, message, "add_generation_prompt")
    prompt = await chat_prompt(engine, body["messages"], tools, thoughts.variables, continues)
    ids = prompt.ids
    thoughts = replace(thoughts, thoughts=None) if continues else thoughts.after(prompt.text)
    limits = ("max_completion_tokens", "max_tokens")
    limit = max_new_tokens(body, limits, config, default=engine.manifest.max_seq_len - len(ids) + 1)
    if limit < 1:
        name = next(name for name in limits if name in body)
        raise ApiError(400, f"{name} is {limit}; set it to at least 1 token", name)
    stops = (*tools.stops, *thoughts.stops)
    params = generation_params(
        engine, config, body, max_new_tokens=limit, logprobs=top_logprobs, grammar=grammar, more_stops=stops
    )
    params = replace(params, shown_tokens=(*params.shown_tokens, *tools.special), thoughts=thoughts.thoughts)
    head = answer_head(model, "chatcmpl", "chat.completion")
    return ChatRequest(head, ids, params, n, tools, thoughts, top_logprobs, stream)


def _top_logprobs(body: dict[str, Any]) -> int | None:
    if body.get("logprobs", False):
        return checked_top_logprobs(body.get("top_logprobs"), "top_logprobs") or 0
    if body.get("top_logprobs"):
        raise ApiError(400, "top_logprobs needs logprobs: true; set both", "top_logprobs")
    return None


def _answer(model: ServedModel, chat: ChatRequest, generations: Sequence[Generation]) -> dict[str, Any]:
    return {
        **chat.head,
        "choices": [_choice(model, chat, index, generation) for index, generation in enumerate(generations)],
        "usage": usage_of(model.engine, generations, chat.n),
    }


def _choice(model: ServedModel, chat: ChatRequest, index: int, generation: Generation) -> dict[str, Any]:
    thoughts, text, calls = chat.parser().feed(generation.text or "", last=True)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message |= {"content": text or None, "tool_calls": [call.body() for call in calls]}
    logprobs = None
    if chat.top_logprobs is not None:
        logprobs = chat_logprobs(generation.logprobs, chat.top_logprobs, model.token_texts)
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": _finish_reason(generation, calls)}


def _finish_reason(generation: Generation, calls: Sequence[ToolCall]) -> str:
    reason = finish_reason(generation.finish_reason)
    return "tool_calls" if calls and reason == "stop" else reason


class ChatStream(ChoiceStream):
    """Each choice has a first event with its role, events with text or whole calls, and a last one with its finish_reason."""

    def __init__(self, model: ServedModel, chat: ChatRequest, options: StreamOptions) -> None:
        super().__init__(model, {**chat.head, "object": "chat.completion.chunk"}, options, chat.top_logprobs, chat.n)
        self._parsers = [chat.parser() for _ in range(chat.n)]
        self._begun: set[int] = set()

    def _of_choice(self, choice: int, chunks: Sequence[Chunk]) -> str:
        events = ""
        if choice not in self._begun:
            self._begun.add(choice)
            events = self._event(choice, '"delta": {"role": "assistant", "content": ""}')
        last = chunks[-1].generation
        parser = self._parsers[choice]
        thoughts, text, calls = parser.read(chunks)
        if self._needs_event(thoughts + text):
            parts = [f'"reasoning_content": {quoted(thoughts)}'] if thoughts else []
            parts += [f'"content": {quoted(text)}'] if text or not parts else []
            events += self._text_event(choice, f'"delta": {{{", ".join(parts)}}}', chunks)
        if calls:
            deltas = [{"index": parser.calls.index(call), **call.body()} for call in calls]
            events += self._event(choice, f'"delta": {quoted({"tool_calls": deltas})}')
        if last is not None:
            events += self._event(choice, '"delta": {}', reason=quoted(_finish_reason(last, parser.calls)))
        return events

    def _logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        assert self._top is not None
        return chat_logprobs(entries, self._top, self._model.token_texts)
