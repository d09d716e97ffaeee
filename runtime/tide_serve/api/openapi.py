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

from tide_serve.request.body import BodyForm
from tide_serve.request.fields import CHAT, COMPLETION, DETOKENIZE, EMBEDDING, RERANK, TOKENIZE
from tide_serve.request.messages_as_chat import COUNT, MESSAGE
from tide_serve.request.responses_as_chat import RESPONSE

_DOCS_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_REF = "#/components/schemas/{model}"


class Error(BaseModel):
    """What `tide_serve.errors.ApiError` sends."""

    error: ErrorObject


class _Route(NamedTuple):
    """The types of a route's bodies: request, answer, events of a stream, and errors; None: those are not described."""

    form: BodyForm
    answer: Any = None
    event: Any = None
    error: Any = Error


def _routes() -> dict[str, _Route]:
    from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent  # takes over a second
    from anthropic.types.shared import ErrorResponse

    return {
        "/v1/chat/completions": _Route(CHAT, ChatCompletion, ChatCompletionChunk),
        "/v1/completions": _Route(COMPLETION, Completion, Completion),
        "/v1/embeddings": _Route(EMBEDDING, CreateEmbeddingResponse),
        "/v1/responses": _Route(RESPONSE, Response),
        "/v1/messages": _Route(MESSAGE, Message, RawMessageStreamEvent, ErrorResponse),
        "/v1/messages/count_tokens": _Route(COUNT, MessageTokensCount, error=ErrorResponse),
        "/v1/rerank": _Route(RERANK),
        "/rerank": _Route(RERANK),
        "/tokenize": _Route(TOKENIZE),
        "/detokenize": _Route(DETOKENIZE),
    }


def openapi_routes(app: FastAPI) -> APIRouter:
    """``/openapi.json`` of ``app``, and ``/docs``, a page that shows what is in it, without scripts."""
    router, lock = APIRouter(include_in_schema=False), Lock()
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
    routes = _routes()
    answers = dict.fromkeys(kind for route in routes.values() for kind in (route.answer, route.event, route.error) if kind)
    of_types, definitions = TypeAdapter.json_schemas(
        [
            *((path, "validation", TypeAdapter(route.form.types.model)) for path, route in routes.items()),
            *((kind, "serialization", TypeAdapter(kind)) for kind in answers),
        ],
        ref_template=_REF,
    )
    document.setdefault("components", {}).setdefault("schemas", {}).update(definitions.get("$defs", {}))
    for path, route in routes.items():
        operation = document["paths"][path]["post"]
        operation["requestBody"] = {"required": True, "content": _json(of_types[path, "validation"])}
        operation["responses"] = {
            "200": {"description": "The answer", "content": _answer(route, of_types)},
            "default": {"description": "An error", "content": _json(of_types[route.error, "serialization"])},
        }
    return document


def _answer(route: _Route, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    if route.answer is None:
        return _json({"type": "object"})
    described = _json(schemas[route.answer, "serialization"])
    if route.event is not None:
        described["text/event-stream"] = {"schema": schemas[route.event, "serialization"]}
    return described


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
