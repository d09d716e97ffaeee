"""``/openapi.json``: requests, from the types that they are checked against, and answers, as the openai package has them.

Routes read their bodies themselves, so FastAPI has no types of them. The document is made for the first request of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any, NamedTuple

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse
from jinja2 import Environment, PackageLoader
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter

from tide_serve.api.routes import POSTS

_DOCS_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_REF = "#/components/schemas/{model}"


class Error(BaseModel):
    """What `tide_serve.errors.ApiError` sends."""

    error: ErrorObject


class _Answer(NamedTuple):
    """The types of a route's answer, of the events of a stream, and of errors; None: those are not described."""

    whole: Any = None
    event: Any = None
    error: Any = Error


def _answers() -> dict[str, _Answer]:
    from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent  # takes over a second
    from anthropic.types.shared import ErrorResponse

    return dict.fromkeys(POSTS, _Answer()) | {
        "/v1/chat/completions": _Answer(ChatCompletion, ChatCompletionChunk),
        "/v1/completions": _Answer(Completion, Completion),
        "/v1/embeddings": _Answer(CreateEmbeddingResponse),
        "/v1/responses": _Answer(Response),
        "/v1/messages": _Answer(Message, RawMessageStreamEvent, ErrorResponse),
        "/v1/messages/count_tokens": _Answer(MessageTokensCount, error=ErrorResponse),
    }


def openapi_routes(app: FastAPI) -> APIRouter:
    """``/openapi.json`` of ``app``, and ``/docs``, a page that shows what is in it, without scripts."""
    router = APIRouter(include_in_schema=False)
    lock = Lock()
    made: dict[str, Any] = {}

    @router.get("/openapi.json")
    def openapi() -> dict[str, Any]:  # in a thread, as types take half a second to describe
        with lock:
            if not made:
                made.update(_with_bodies(app.openapi()))
            return made

    @router.get("/docs")
    def docs() -> HTMLResponse:
        page = Environment(loader=PackageLoader("tide_serve", "page"), autoescape=True).get_template("docs.html.j2")
        return HTMLResponse(page.render(document=openapi()), headers={"Content-Security-Policy": _DOCS_POLICY})

    return router


def _with_bodies(document: dict[str, Any]) -> dict[str, Any]:
    answers = _answers()
    kinds = dict.fromkeys(kind for answer in answers.values() for kind in answer if kind)
    of_types, definitions = TypeAdapter.json_schemas(
        [
            *((path, "validation", TypeAdapter(post.form.types.model)) for path, post in POSTS.items()),
            *((kind, "serialization", TypeAdapter(kind)) for kind in kinds),
        ],
        ref_template=_REF,
    )
    described: Mapping[Any, Any] = {kind: schema for (kind, _), schema in of_types.items()}
    document.setdefault("components", {}).setdefault("schemas", {}).update(definitions.get("$defs", {}))
    for path, answer in answers.items():
        content = _json(described.get(answer.whole, {"type": "object"}))
        if answer.event is not None:
            content["text/event-stream"] = {"schema": described[answer.event]}
        operation = document["paths"][path]["post"]
        operation["requestBody"] = {"required": True, "content": _json(described[path])}
        operation["responses"] = {
            "200": {"description": "The answer", "content": content},
            "default": {"description": "An error", "content": _json(described[answer.error])},
        }
    return document


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
