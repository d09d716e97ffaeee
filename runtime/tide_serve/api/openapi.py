"""``/openapi.json``: requests, from the types that they are checked against, and answers, as the openai package has them.

Routes read their bodies themselves, so FastAPI has no types of them. The document is made for the first request of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any, NamedTuple

from fastapi import APIRouter, FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter

from tide_serve.request.body import BodyForm
from tide_serve.request.fields import CHAT, COMPLETION, DETOKENIZE, EMBEDDING, RERANK, TOKENIZE
from tide_serve.request.messages_as_chat import COUNT, MESSAGE
from tide_serve.request.responses_as_chat import RESPONSE

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
    """``/openapi.json`` of ``app``, and ``/docs``, a page that shows it with scripts from a public server."""
    router, lock = APIRouter(include_in_schema=False), Lock()
    made: dict[str, Any] = {}

    @router.get("/openapi.json")
    def openapi() -> dict[str, Any]:  # in a thread, as types take half a second to describe
        with lock:
            if not made:
                made.update(_with_bodies(app.openapi()))
            return made

    @router.get("/docs")
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(openapi_url="openapi.json", title=app.title)

    return router


def _with_bodies(document: dict[str, Any]) -> dict[str, Any]:
    routes = _routes()
    forms = [route.form for route in routes.values()]
    adapters = {(form.name, name): adapter for form in forms for name, adapter in form.types.adapters.items()}
    kinds = dict.fromkeys(
        kind for route in routes.values() for kind in (route.answer, route.event, route.error) if kind is not None
    )
    of_types, definitions = TypeAdapter.json_schemas(
        [
            *((key, "validation", adapter) for key, adapter in adapters.items()),
            *((kind, "serialization", TypeAdapter(kind)) for kind in kinds),
        ],
        ref_template=_REF,
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas |= definitions.get("$defs", {})
    for path, route in routes.items():
        fields = {name: of_types[(route.form.name, name), "validation"] for name in route.form.types.adapters}
        schemas[route.form.name] = _object(route.form, fields)
        operation = document["paths"][path]["post"]
        operation["requestBody"] = {"required": True, "content": _json({"$ref": _REF.format(model=route.form.name)})}
        operation["responses"] = {
            "200": {"description": "The answer", "content": _answer(route, of_types)},
            "default": {"description": "An error", "content": _json(of_types[route.error, "serialization"])},
        }
    return document


def _object(form: BodyForm, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a request's body, without fields that are refused."""
    properties: dict[str, Any] = {}
    for name, support in form.fields.items():
        if support.kind != "refused" and name in fields:
            properties[name] = {**fields[name], "description": "Changes nothing."} if support.kind == "harmless" else fields[name]
    return {"type": "object", "properties": properties, "required": [*form.types.required], "additionalProperties": False}


def _answer(route: _Route, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    if route.answer is None:
        return _json({"type": "object"})
    described = _json(schemas[route.answer, "serialization"])
    if route.event is not None:
        described["text/event-stream"] = {"schema": schemas[route.event, "serialization"]}
    return described


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
