"""The routes that take a body: its form, and what answers it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response

from tide_serve.api.chat import answer_chat
from tide_serve.api.completions import answer_completion
from tide_serve.api.embeddings import answer_embeddings
from tide_serve.api.messages import answer_message, count_tokens
from tide_serve.api.rerank import answer_rerank
from tide_serve.api.responses import answer_response
from tide_serve.api.service import ServedModel, Service
from tide_serve.api.tokenize import detokenize, tokenize
from tide_serve.request.body import BodyForm, read_body
from tide_serve.request.fields import CHAT, COMPLETION, DETOKENIZE, EMBEDDING, RERANK, TOKENIZE
from tide_serve.request.messages_as_chat import COUNT, MESSAGE
from tide_serve.request.responses_as_chat import RESPONSE


class Post(NamedTuple):
    """A route. ``writes``: only models that write text have it."""

    form: BodyForm
    answer: Callable[[ServedModel, Request, dict[str, Any]], Awaitable[Response]]
    writes: bool = True


POSTS = {
    "/v1/chat/completions": Post(CHAT, answer_chat),
    "/v1/completions": Post(COMPLETION, answer_completion),
    "/v1/embeddings": Post(EMBEDDING, answer_embeddings, writes=False),
    "/v1/rerank": Post(RERANK, answer_rerank),
    "/rerank": Post(RERANK, answer_rerank),
    "/v1/responses": Post(RESPONSE, answer_response),
    "/v1/messages": Post(MESSAGE, answer_message),
    "/v1/messages/count_tokens": Post(COUNT, count_tokens),
    "/tokenize": Post(TOKENIZE, tokenize, writes=False),
    "/detokenize": Post(DETOKENIZE, detokenize, writes=False),
}


def post_routes(service: Service) -> APIRouter:
    router = APIRouter()
    for path, post in POSTS.items():
        router.add_api_route(path, _endpoint(service, post), methods=["POST"], name=post.answer.__name__)
    return router


def _endpoint(service: Service, post: Post) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        body = await read_body(request, post.form, service.config)
        model = await (service.writer if post.writes else service.model)(request, body.get("model"))
        return await post.answer(model, request, body)

    return endpoint
