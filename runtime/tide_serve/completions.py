"""POST /v1/completions.

Fields are those of OpenAI's API, with the extensions of /v1/chat/completions; `request_fields.COMPLETION_FIELDS` says what
becomes of each. ``max_tokens`` defaults to 16, as OpenAI's. With ``echo`` it may be 0: nothing is generated then, and with
``logprobs`` the prompt's own log-probabilities are the answer. Each of several prompts has ``n`` choices, one prompt's after
another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.completion_choice import Logprobs
from openai.types.completion_create_params import CompletionCreateParamsBase
from tide_runtime import Generation, GenerationParams
from tide_runtime.sampler import TokenLogprob

from tide_serve.answers import AnswerHead, answer_head, finish_reason
from tide_serve.completion_stream import CompletionStream
from tide_serve.echo import Echo, echo_of
from tide_serve.errors import ApiError
from tide_serve.event_stream import begun
from tide_serve.logprobs import completion_logprobs
from tide_serve.prompts import Prompt, each_prompt, text_prompt
from tide_serve.request_body import read_body
from tide_serve.request_fields import COMPLETION_FIELDS
from tide_serve.request_types import RequestTypes
from tide_serve.running import Running
from tide_serve.sampling import TOP_LOGPROBS, choices, generation_params, max_new_tokens, of_choice
from tide_serve.service import Service
from tide_serve.stream_options import EXTENSION_TYPES, StreamOptions, stream_options
from tide_serve.structured import check_grammar, response_grammar
from tide_serve.token_texts import TextOffsets
from tide_serve.usage import usage_of

_MAX_TOKENS = 16


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request.

    Args:
        params: of the generations; None: the prompts are only echoed.
        n: choices of each prompt.
        top_logprobs: None: no log-probabilities.
    """

    head: AnswerHead
    prompts: list[Prompt]
    params: GenerationParams | None
    n: int
    echo: bool
    top_logprobs: int | None
    stream: StreamOptions | None

    @property
    def jobs(self) -> list[tuple[Sequence[int], GenerationParams]]:
        if self.params is None:
            return []
        return [(prompt.ids, of_choice(self.params, choice)) for prompt in self.prompts for choice in range(self.n)]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)


def completions_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = await checked(service, await read_body(request, COMPLETION_FIELDS, completion_types(), service.config))
        echo = None
        if asked.echo:
            echo = await echo_of(service, request, asked.prompts, asked.n, asked.top_logprobs)
        running = Running(service, request, asked.jobs, streamed=asked.stream is not None)
        if asked.stream is not None:
            stream = CompletionStream(service, asked.head, asked.stream, asked.top_logprobs, echo)
            return await begun(stream.events(running, len(asked.prompts), asked.n, asked.prompt_tokens))
        generations = await running.results()
        if running.client_left:
            return Response(status_code=499)
        return JSONResponse(_answer(service, asked, generations, echo))

    return router


@cache
def completion_types() -> RequestTypes:
    return RequestTypes(CompletionCreateParamsBase, EXTENSION_TYPES)


async def checked(service: Service, body: dict[str, Any]) -> CompletionRequest:
    """The request of a ``body`` whose fields and types are right. Raises ApiError for what cannot be done."""
    service.check_model(body["model"])
    engine, config = service.engine, service.config
    stream, top_logprobs, echo = stream_options(body), _top_logprobs(body), body.get("echo", False)
    if "best_of" in body and body["best_of"] != body.get("n", 1):
        raise ApiError(400, "best_of differs from n, and choices are not ranked; ask for n choices", "best_of")
    grammar = response_grammar(body.get("response_format"), config)
    await check_grammar(engine, grammar)
    texts = each_prompt(body["prompt"])
    n = choices(body, config, len(texts))
    prompts = [await text_prompt(engine, text) for text in texts]
    limit = max_new_tokens(body, ("max_tokens",), config, default=_MAX_TOKENS)
    if limit < 1 and not echo:
        raise ApiError(400, "max_tokens is 0 and echo is off; set max_tokens to at least 1, or echo the prompt", "max_tokens")
    # Of a request that generates nothing they are checked all the same.
    params = generation_params(service, body, max_new_tokens=max(1, limit), logprobs=top_logprobs, grammar=grammar)
    head = answer_head(service, "cmpl", body["model"])
    return CompletionRequest(head, prompts, params if limit else None, n, echo, top_logprobs, stream)


def _top_logprobs(body: dict[str, Any]) -> int | None:
    top: int | None = body.get("logprobs")
    if top is not None and not 0 <= top <= TOP_LOGPROBS:
        raise ApiError(400, f"logprobs is {top}; set it to a number from 0 to {TOP_LOGPROBS}", "logprobs")
    return top


def _answer(service: Service, asked: CompletionRequest, generations: Sequence[Generation], echo: Echo | None) -> dict[str, Any]:
    head, num_choices = asked.head, len(asked.prompts) * asked.n
    each: Sequence[Generation | None] = generations or [None] * num_choices
    answer = Completion(
        id=head.id,
        object="text_completion",
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=[_choice(service, asked, index, generation, echo) for index, generation in enumerate(each)],
        usage=CompletionUsage.model_validate(usage_of(service.engine, generations, asked.n, asked.prompt_tokens)),
    )
    return answer.model_dump(mode="json", exclude_unset=True)


def _choice(
    service: Service, asked: CompletionRequest, index: int, generation: Generation | None, echo: Echo | None
) -> CompletionChoice:
    reason = finish_reason(generation.finish_reason) if generation is not None else "length"
    text = (generation.text or "") if generation is not None else ""
    entries: Sequence[TokenLogprob] = generation.logprobs if generation is not None else ()
    logprobs = None
    if asked.top_logprobs is not None:
        offsets, places = TextOffsets(service.token_texts, service.engine.tokenizer), []
        unscored, scored = echo.logprobs(index) if echo is not None else (0, ())
        if echo is not None:
            places = offsets.of_prompt(echo.prompt(index).ids, echo.prompt(index).text)
        places += offsets.of([entry.token for entry in entries])
        lists = completion_logprobs([*scored, *entries], asked.top_logprobs, service.token_texts, places, unscored)
        logprobs = Logprobs.construct(**lists)  # the openai package has no null in token_logprobs, and OpenAI sends it
    text = echo.prompt(index).text + text if echo is not None else text
    return CompletionChoice.construct(index=index, text=text, logprobs=logprobs, finish_reason=reason)
