"""``/openapi.json``: the bodies of requests and answers, from the types that requests are checked against and answers made of.

Routes read their bodies themselves, so FastAPI knows nothing of them. The document is made when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import Any, NamedTuple

from fastapi import APIRouter, FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import TypeAdapter

from tide_serve.request.body import RequestTypes, Support
from tide_serve.request.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    DETOKENIZE_FIELDS,
    TOKENIZE_FIELDS,
    chat_types,
    completion_types,
    detokenize_types,
    tokenize_types,
)
from tide_serve.request.responses_as_chat import RESPONSE_FIELDS, response_types

_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


class _Body(NamedTuple):
    """The types of a route's bodies: its answer, and the events of a stream; None: those are not described."""

    name: str
    fields: Mapping[str, Support]
    types: RequestTypes
    answer: Any = None
    event: Any = None


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
    bodies = {
        "/v1/chat/completions": _Body("ChatCompletionRequest", CHAT_FIELDS, chat_types(), ChatCompletion, ChatCompletionChunk),
        "/v1/completions": _Body("CompletionRequest", COMPLETION_FIELDS, completion_types(), Completion, Completion),
        "/v1/responses": _Body("ResponseRequest", RESPONSE_FIELDS, response_types(), Response),
        "/tokenize": _Body("TokenizeRequest", TOKENIZE_FIELDS, tokenize_types()),
        "/detokenize": _Body("DetokenizeRequest", DETOKENIZE_FIELDS, detokenize_types()),
    }
    adapters = {(body.name, name): adapter for body in bodies.values() for name, adapter in body.types.adapters.items()}
    answers = {kind: TypeAdapter(kind) for body in bodies.values() for kind in (body.answer, body.event) if kind is not None}
    of_fields, definitions = TypeAdapter.json_schemas(
        [
            *((key, "validation", adapter) for key, adapter in adapters.items()),
            *((kind, "serialization", adapter) for kind, adapter in answers.items()),
        ],
        ref_template=_REF,
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas |= {**definitions.get("$defs", {}), "Error": _ERROR}
    for path, body in bodies.items():
        fields = {name: of_fields[(body.name, name), "validation"] for name in body.types.adapters}
        schemas[body.name] = _object(body, fields)
        operation = document["paths"][path]["post"]
        operation["requestBody"] = {"required": True, "content": _json(_ref(body.name))}
        operation["responses"] = {
            "200": {"description": "The answer", "content": _answer(body, of_fields)},
            "default": {"description": "An error", "content": _json(_ref("Error"))},
        }
    return document


def _object(body: _Body, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a request's body, without fields that are refused."""
    properties: dict[str, Any] = {}
    for name, support in body.fields.items():
        if support.kind != "refused" and name in fields:
            properties[name] = {**fields[name], "description": "Changes nothing."} if support.kind == "harmless" else fields[name]
    return {"type": "object", "properties": properties, "required": body.types.required, "additionalProperties": False}


def _answer(body: _Body, schemas: Mapping[Any, Any]) -> dict[str, Any]:
    if body.answer is None:
        return _json({"type": "object"})
    described = _json(schemas[body.answer, "serialization"])
    if body.event is not None:
        described["text/event-stream"] = {"schema": schemas[body.event, "serialization"]}
    return described


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": _REF.format(model=name)}
