"""POST /v1/completions.

Fields are those of OpenAI's API, with the extensions of /v1/chat/completions. ``max_tokens`` defaults to 16, as OpenAI's.
With ``suffix`` the text fills the gap before it, where the model has tokens for that (see `request.fill_in_middle`). With
``echo`` it may be 0: nothing is generated then, and with ``logprobs`` the prompt's own log-probabilities are the answer. Each
of several prompts has ``n`` choices, one prompt's after another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import Request, Response
from tide_runtime import Chunk, Generation, GenerationParams, Score
from tide_runtime.sampler import TokenLogprob

from tide_serve.api.answer_fields import answer_head, finish_reason, usage_of
from tide_serve.api.event_stream import ChoiceStream, quoted, respond
from tide_serve.api.logprobs import TextOffsets, completion_logprobs
from tide_serve.api.queued import results_of
from tide_serve.api.service import ServedModel
from tide_serve.errors import ApiError, fields_named
from tide_serve.request.fill_in_middle import ends, gap_prompt
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
from tide_serve.request.prompt_ids import Prompt, each_prompt, text_prompt
from tide_serve.request.structured import response_grammar

_MAX_TOKENS = 16
Scored = Sequence[Sequence[TokenLogprob]]  # log-probabilities of each echoed prompt's tokens after the first


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request.

    Args:
        head: the first fields of its answer (see `answer_head`).
        params: None: the prompts are only echoed.
        n: choices of each prompt.
        top_logprobs: None: no log-probabilities.
        stream: None: the answer is not streamed.
    """

    head: dict[str, Any]
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
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    def prompt(self, choice: int) -> Prompt:
        return self.prompts[choice // self.n]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)


async def answer_completion(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    completion = await checked(model, body)
    scored = await _scored(model, request, completion)
    options = completion.stream
    stream = CompletionStream(model, completion, options, scored) if options is not None else None
    return await respond(model, request, completion.jobs, stream, partial(_answer, model, completion, scored))


async def checked(model: ServedModel, body: dict[str, Any]) -> CompletionRequest:
    """The request of a ``body`` whose fields and types are right. Raises ApiError or ParamsError for what cannot be done."""
    terms, name_of = in_openais_terms(body)
    with fields_named(name_of):
        return await _checked(model, terms)


async def _checked(model: ServedModel, body: dict[str, Any]) -> CompletionRequest:
    engine, config = model.engine, model.config
    stream = stream_options(body)
    top_logprobs = checked_top_logprobs(body.get("logprobs"), "logprobs")
    echo = body.get("echo", False)
    if "best_of" in body and body["best_of"] != body.get("n", 1):
        raise ApiError(400, "best_of differs from n, and choices are not ranked; ask for n choices", "best_of")
    grammar = await response_grammar(engine, body["response_format"], config) if "response_format" in body else None
    texts = each_prompt(body["prompt"])
    suffix = body.get("suffix", "")
    n = choices(body, config, len(texts))
    if suffix and echo:
        raise ApiError(400, "echo cannot be given together with suffix, before which the text stands; leave out one", "echo")
    prompts = [await (gap_prompt(engine, text, suffix) if suffix else text_prompt(engine, text)) for text in texts]
    limit = max_new_tokens(body, ("max_tokens",), config, default=_MAX_TOKENS)
    if limit < 1 and not echo:
        raise ApiError(400, "max_tokens is 0 and echo is off; set max_tokens to at least 1, or echo the prompt", "max_tokens")
    # The parameters of a request that generates nothing are checked all the same.
    params = generation_params(engine, config, body, max_new_tokens=max(1, limit), logprobs=top_logprobs, grammar=grammar)
    if suffix:
        params = replace(params, eos_token_ids=(*ends(engine), *(params.eos_token_ids or ())))
    head = answer_head(model, "cmpl", "text_completion")
    return CompletionRequest(head, prompts, params if limit else None, n, echo, top_logprobs, stream)


def _answer(
    model: ServedModel, completion: CompletionRequest, scored: Scored, generations: Sequence[Generation]
) -> dict[str, Any]:
    each: Sequence[Generation | None] = generations or [None] * completion.num_choices
    return {
        **completion.head,
        "choices": [_choice(model, completion, scored, index, generation) for index, generation in enumerate(each)],
        "usage": usage_of(model.engine, generations, completion.n, completion.prompt_tokens),
    }


def _choice(
    model: ServedModel, completion: CompletionRequest, scored: Scored, index: int, generation: Generation | None
) -> dict[str, Any]:
    reason = finish_reason(generation.finish_reason) if generation is not None else "length"
    text = (generation.text or "") if generation is not None else ""
    prompt = completion.prompt(index)
    generated = generation.logprobs if generation is not None else ()
    entries: Sequence[TokenLogprob] = generated
    logprobs = None
    if completion.top_logprobs is not None:
        offsets = TextOffsets(model.token_texts, model.engine.tokenizer)
        spans = []
        unscored = 0
        if completion.echo:
            spans = offsets.of_prompt(prompt.ids, prompt.text)
            unscored = min(1, len(prompt.ids))
            entries = [*scored[index // completion.n], *entries]
        spans += offsets.of([entry.token for entry in generated])
        logprobs = completion_logprobs(entries, completion.top_logprobs, model.token_texts, spans, unscored)
    text = prompt.text + text if completion.echo else text
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


class CompletionStream(ChoiceStream):
    """Each choice has events with text, the echoed prompt first, and a last one with its finish_reason."""

    def __init__(self, model: ServedModel, completion: CompletionRequest, options: StreamOptions, scored: Scored) -> None:
        super().__init__(model, completion.head, options, completion.top_logprobs, completion.n)
        self._completion, self._scored = completion, scored
        self._offsets: dict[int, TextOffsets] = {}

    def _begin(self) -> str:
        completion = self._completion
        return "".join(self._echoed(choice) for choice in range(completion.num_choices)) if completion.echo else ""

    def _ending(self, generations: Sequence[Generation], prompt_tokens: int | None = None) -> str:
        completion = self._completion
        events = ""
        if not generations:  # the prompts are only echoed
            events = "".join(self._event(choice, '"text": ""', reason='"length"') for choice in range(completion.num_choices))
        return events + super()._ending(generations, completion.prompt_tokens)

    def _echoed(self, choice: int) -> str:
        prompt = self._completion.prompt(choice)
        logprobs = "null"
        if self._top is not None:
            spans = self._offsets_of(choice).of_prompt(prompt.ids, prompt.text)
            scored = self._scored[choice // self._completion.n]
            unscored = min(1, len(prompt.ids))
            logprobs = quoted(completion_logprobs(scored, self._top, self._model.token_texts, spans, unscored))
        return self._event(choice, f'"text": {quoted(prompt.text)}', logprobs)

    def _of_choice(self, choice: int, chunks: Sequence[Chunk]) -> str:
        text = "".join([chunk.text for chunk in chunks])
        last = chunks[-1].generation
        events = self._text_event(choice, f'"text": {quoted(text)}', chunks) if self._needs_event(text) else ""
        if last is not None:
            events += self._event(choice, '"text": ""', reason=quoted(finish_reason(last.finish_reason)))
        return events

    def _logprobs(self, choice: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        assert self._top is not None
        spans = self._offsets_of(choice).of([entry.token for entry in entries])
        return completion_logprobs(entries, self._top, self._model.token_texts, spans)

    def _offsets_of(self, choice: int) -> TextOffsets:
        if choice not in self._offsets:
            self._offsets[choice] = TextOffsets(self._model.token_texts, self._model.engine.tokenizer)
        return self._offsets[choice]


async def _scored(model: ServedModel, request: Request, completion: CompletionRequest) -> Scored:
    """Log-probabilities of the prompts' tokens; none where the request has no ``echo`` or no ``logprobs``.

    Raises what `Engine.submit_score` raises, EngineClosedError where the client leaves, and ApiError beyond the time limit.
    """
    top = completion.top_logprobs
    prompts = [prompt.ids for prompt in completion.prompts]
    if top is None or not completion.echo:
        return []
    submit = partial(model.engine.submit_score, prompt_tokens=1, top=max(1, top), adapter=model.adapter)
    scores = iter(await results_of(model, request, (partial(submit, ids) for ids in prompts if len(ids) > 1)))
    return [_entries(ids, next(scores)) if len(ids) > 1 else [] for ids in prompts]


def _entries(ids: Sequence[int], score: Score) -> list[TokenLogprob]:
    """Log-probability and likeliest tokens at each of ``ids`` after the first.

    A token among the likeliest has the same number in both, so that clients can tell whether it is the likeliest.
    """
    entries = []
    for token, logprob, top in zip(ids[1:], score.logprobs, score.top, strict=True):
        entries.append(TokenLogprob(token, dict(top).get(token, logprob), top))
    return entries
