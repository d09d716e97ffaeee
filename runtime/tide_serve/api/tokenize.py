"""POST /tokenize and /detokenize, as in vLLM.

``/tokenize`` takes ``prompt`` (text, with ``add_special_tokens``, true by default) or ``messages`` and ``tools`` (the prompt of
/v1/chat/completions), and ``return_token_strs``. ``/detokenize`` takes ``tokens``.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from tide_runtime.errors import PromptError

from tide_serve.api.service import ServedModel
from tide_serve.errors import ApiError
from tide_serve.request.prompt_ids import chat_prompt, off_loop
from tide_serve.request.tools import plan_tools


async def tokenize(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    if ("prompt" in body) == ("messages" in body):
        raise ApiError(400, "give either prompt or messages", "prompt")
    ids = await (_text_ids(model, body) if "prompt" in body else _chat_ids(model, body))
    return await off_loop(len(ids), _answer, model, ids, body.get("return_token_strs", False))


async def detokenize(model: ServedModel, request: Request, body: dict[str, Any]) -> Response:
    tokenizer = model.engine.tokenizer
    ids = body["tokens"]
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer; send and read token ids", "tokens")
    vocab = model.engine.manifest.model.vocab_size
    if wrong := next((token for token in ids if not 0 <= token < vocab), None):
        raise ApiError(400, f"tokens has {wrong}, expected integers from 0 to {vocab - 1}", "tokens")
    return JSONResponse({"prompt": await off_loop(len(ids), tokenizer.decode, ids, False)})


def _answer(model: ServedModel, ids: list[int], with_texts: bool) -> Response:
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.engine.manifest.max_seq_len, "tokens": ids}
    if with_texts:
        answer["token_strs"] = [model.token_texts.text_of(token) for token in ids]
    return JSONResponse(answer)


async def _text_ids(model: ServedModel, body: dict[str, Any]) -> list[int]:
    tokenizer = model.engine.tokenizer
    text = body["prompt"]
    if tokenizer is None:
        raise ApiError(400, "this model has no tokenizer; send token ids to /v1/completions", "prompt")
    try:
        return await off_loop(len(text), tokenizer.encode, text, body.get("add_special_tokens", True))
    except PromptError as error:
        raise ApiError(400, str(error), "prompt") from error


async def _chat_ids(model: ServedModel, body: dict[str, Any]) -> list[int]:
    tools = plan_tools(body, model.engine, model.config)
    return (await chat_prompt(model.engine, body["messages"], tools)).ids
