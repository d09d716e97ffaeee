"""POST /v1/chat/completions.

Fields are those of OpenAI's API; `request_fields.CHAT_FIELDS` says what becomes of each. Extensions:

- ``top_k``, ``min_p``, ``repetition_penalty``, ``ignore_eos``, ``cache_salt``: see `tide_runtime.GenerationParams`.
- ``depth_policy``: the engine's own or "auto"; others are refused, as an engine is loaded for one policy.
- ``response_format``: also with a regex or a Lark grammar, see `tide_serve.structured`.
- ``stream_options.include_depth``: the choices of a stream have ``depths``, the layers run for each of the event's tokens.
- ``usage`` has ``depth``, see `tide_serve.usage`.

``max_tokens`` and ``max_completion_tokens`` default to the rest of the context. An answer that the server's time limit ends has
``finish_reason`` "length".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from tide_runtime import Generation, GenerationParams

from tide_serve.answers import AnswerHead, answer_head, finish_reason
from tide_serve.chat_stream import ChatStream
from tide_serve.errors import ApiError
from tide_serve.event_stream import begun
from tide_serve.logprobs import chat_logprobs
from tide_serve.messages import MessageParam
from tide_serve.prompts import chat_prompt
from tide_serve.request_body import read_body
from tide_serve.request_fields import CHAT_FIELDS
from tide_serve.request_types import RequestTypes
from tide_serve.running import Running
from tide_serve.sampling import TOP_LOGPROBS, choices, generation_params, max_new_tokens, of_choice
from tide_serve.service import Service
from tide_serve.stream_options import EXTENSION_TYPES, StreamOptions, stream_options
from tide_serve.structured import check_grammar, response_grammar
from tide_serve.tools import ToolPlan, plan_tools
from tide_serve.usage import usage_of


@dataclass(frozen=True)
class ChatRequest:
    """A checked request.

    Args:
        ids: token ids of the prompt.
        n: choices.
        top_logprobs: None: no log-probabilities.
    """

    head: AnswerHead
    ids: list[int]
    params: GenerationParams
    n: int
    tools: ToolPlan
    top_logprobs: int | None
    stream: StreamOptions | None

    @property
    def jobs(self) -> list[tuple[Sequence[int], GenerationParams]]:
        return [(self.ids, of_choice(self.params, choice)) for choice in range(self.n)]


def chat_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, CHAT_FIELDS, chat_types(), service.config)
        chat = await checked(service, body)
        running = Running(service, request, chat.jobs, streamed=chat.stream is not None)
        if chat.stream is not None:
            stream = ChatStream(service, chat.head, chat.stream, chat.tools, chat.top_logprobs)
            return await begun(stream.events(running, chat.n))
        generations = await running.results()
        if running.client_left:
            return Response(status_code=499)
        return JSONResponse(_answer(service, chat, generations))

    return router


@cache
def chat_types() -> RequestTypes:
    return RequestTypes(CompletionCreateParamsBase, {**EXTENSION_TYPES, "messages": list[MessageParam]})


async def checked(service: Service, body: dict[str, Any]) -> ChatRequest:
    """The request of a ``body`` whose fields and types are right. Raises ApiError for what cannot be done."""
    service.check_model(body["model"])
    engine, config = service.engine, service.config
    stream, n = stream_options(body), choices(body, config)
    top_logprobs = _top_logprobs(body)
    tools = plan_tools(body, engine, config)
    answer = response_grammar(body.get("response_format"), config)
    await check_grammar(engine, answer)
    grammar = tools.grammar(answer)
    await check_grammar(engine, grammar, "tools")
    ids = await chat_prompt(engine, body["messages"], tools)
    limits = ("max_completion_tokens", "max_tokens")
    limit = max_new_tokens(body, limits, config, default=engine.manifest.max_seq_len - len(ids) + 1)
    if limit < 1:
        name = next(name for name in limits if name in body)
        raise ApiError(400, f"{name} is {limit}; set it to at least 1 token", name)
    params = generation_params(
        service, body, max_new_tokens=limit, logprobs=top_logprobs, grammar=grammar, more_stops=tools.stops
    )
    params = replace(params, shown_tokens=tuple(tools.special))
    return ChatRequest(answer_head(service, "chatcmpl", body["model"]), ids, params, n, tools, top_logprobs, stream)


def _top_logprobs(body: dict[str, Any]) -> int | None:
    top: int | None = body.get("top_logprobs")
    if not body.get("logprobs", False):
        if top:
            raise ApiError(400, "top_logprobs needs logprobs: true; set both", "top_logprobs")
        return None
    if not 0 <= (top or 0) <= TOP_LOGPROBS:
        raise ApiError(400, f"top_logprobs is {top}; set it to a number from 0 to {TOP_LOGPROBS}", "top_logprobs")
    return top or 0


def _answer(service: Service, chat: ChatRequest, generations: Sequence[Generation]) -> dict[str, Any]:
    head = chat.head
    answer = ChatCompletion(
        id=head.id,
        object="chat.completion",
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=[_choice(service, chat, index, generation) for index, generation in enumerate(generations)],
        usage=CompletionUsage.model_validate(usage_of(service.engine, generations, chat.n)),
    )
    return answer.model_dump(mode="json", exclude_unset=True)


def _choice(service: Service, chat: ChatRequest, index: int, generation: Generation) -> Choice:
    text, calls = chat.tools.split(generation.text or "")
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    reason = finish_reason(generation.finish_reason)
    if calls:
        message |= {"content": text or None, "tool_calls": [call.body() for call in calls]}
        reason = "tool_calls" if reason == "stop" else reason
    logprobs = None
    if chat.top_logprobs is not None:
        logprobs = chat_logprobs(generation.logprobs, chat.top_logprobs, service.token_texts)
    return Choice.model_validate(
        {
            "index": index,
            "message": ChatCompletionMessage.model_validate(message),
            "logprobs": logprobs,
            "finish_reason": reason,
        }
    )
