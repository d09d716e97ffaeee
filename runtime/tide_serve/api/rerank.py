"""POST /v1/rerank and /rerank, with the bodies of Jina's, Cohere's and vLLM's.

A document's score is the probability of the token "yes" against "no" behind a chat that asks whether it meets the query, as
Qwen3-Reranker was trained to answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import exp
from typing import Any
from uuid import uuid4

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from tide_runtime import Engine
from tide_runtime.errors import PromptError
from tide_runtime.text.chat_template import analysed

from tide_serve.api.queued import results_of
from tide_serve.api.service import ServedModel
from tide_serve.errors import ApiError
from tide_serve.observe.request_record import current_record
from tide_serve.request.prompt_ids import check_length, check_text, off_loop

_TOP = 20  # likeliest tokens of a pass: nearly always both answers are among them
_ANSWERS = ("yes", "no")
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


async def answer_rerank(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    texts = [document if isinstance(document, str) else document["text"] for document in body["documents"]]
    top_n = body.get("top_n", len(texts))
    if not texts or top_n < 1:
        name = "documents" if not texts else "top_n"
        raise ApiError(400, f"{name} is {body[name]}; give at least one document and a top_n of at least 1", name)
    answers = _answers(model)
    prompts = await off_loop(sum(map(len, texts)), _prompts, model.engine, body, texts)
    tokens = sum(map(len, prompts))
    if (record := current_record.get()) is not None:
        record.prompt_tokens += tokens
    scores = await _scores(model, request, prompts, answers)
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[:top_n]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
    if body.get("return_documents", True):
        results = [{**result, "document": {"text": texts[index]}} for index, result in zip(order, results, strict=True)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JSONResponse({"id": f"rerank-{uuid4().hex}", "model": model.name, "results": results, "usage": usage})


def _answers(model: ServedModel) -> tuple[int, int]:
    """The tokens of both answers. Raises ApiError for a model that has none, or no chat template."""
    engine = model.engine
    reason = "the model has no chat template"
    if engine.chat_template and engine.tokenizer is not None:
        yes, no = (engine.tokenizer.encode(answer, add_special_tokens=False) for answer in _ANSWERS)
        if len(yes) == len(no) == 1:
            return yes[0], no[0]
        reason = f'"yes" and "no" are {len(yes)} and {len(no)} tokens of the model, where each has to be one'
    message = f"the model {model.name!r} cannot rerank: {reason}; name a reranker of Qwen3-Reranker's form"
    raise ApiError(400, message, "model", "no_rerank")


def _prompts(engine: Engine, body: Mapping[str, Any], texts: Sequence[str]) -> list[list[int]]:
    """Token ids of the chat of each document. Raises ApiError for one that is too long, or that the template refuses."""
    assert engine.tokenizer is not None and engine.chat_template is not None
    thoughts = analysed(engine.chat_template).thoughts
    off = {thoughts.switch: False} if thoughts.switch is not None else {}
    prompts = []
    try:
        for index, document in enumerate(texts):
            text = engine.chat_text(_chat(body, document), **off)
            check_text(engine, text, f"documents[{index}]")
            prompts.append(engine.tokenizer.encode(text, add_special_tokens=False))
            check_length(engine, prompts[-1], f"documents[{index}]")
    except PromptError as error:
        raise ApiError(400, str(error), "documents") from error
    return prompts


def _chat(body: Mapping[str, Any], document: str) -> list[dict[str, Any]]:
    """Qwen3-Reranker's chat."""
    question = f"<Instruct>: {body.get('instruction', _INSTRUCTION)}\n<Query>: {body['query']}\n<Document>: {document}"
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]


async def _scores(
    model: ServedModel, request: Request, prompts: Sequence[Sequence[int]], answers: tuple[int, int]
) -> list[float]:
    """The probability of the first of ``answers`` against the second after each of ``prompts``."""
    yes, no = answers
    submit = partial(model.engine.submit_score, adapter=model.adapter)
    passes = await results_of(model, request, (partial(submit, [*ids, yes], len(ids), _TOP) for ids in prompts))
    found = [dict(score.top[0]).get(no) for score in passes]
    rest = [ids for ids, logprob in zip(prompts, found, strict=True) if logprob is None]
    others = iter(await results_of(model, request, (partial(submit, [*ids, no], len(ids)) for ids in rest)))
    against = [next(others).logprobs[0] if logprob is None else logprob for logprob in found]
    return [1 / (1 + exp(other - score.logprobs[0])) for score, other in zip(passes, against, strict=True)]
