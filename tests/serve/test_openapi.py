"""The OpenAPI document and the routes."""

import re
from typing import Any

import httpx
import jsonschema
import pytest

HI = [{"role": "user", "content": "Hi"}]


CALL = {"id": "c1", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}}


HISTORY = [
    *HI,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "x", "tool_call_id": "c1"},
]


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> dict[str, Any]:
    answer = http.get("/openapi.json")
    assert answer.status_code == 200
    document: dict[str, Any] = answer.json()
    return document


def test_the_page_of_the_routes_needs_no_network(http: httpx.Client) -> None:
    """Breaks: /docs is blank where there is no internet, or lacks a route's fields."""
    answer = http.get("/docs")
    assert answer.status_code == 200 and not re.search(r"<script|src=|https?://", answer.text)
    assert "<b>POST /v1/chat/completions</b>" in answer.text and "<code>messages</code> (required)" in answer.text


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    return jsonschema.Draft202012Validator({**schema, "components": document["components"]})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HISTORY, "tools": TOOLS, "max_tokens": 2, "stop": ["x"], "top_k": 3}),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 2, "logprobs": True, "response_format": {"type": "json_object"}}),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "logprobs": 1}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": HI, "max_tokens": 2, "system": "x", "top_k": 3, "metadata": {"user_id": "me"}}),
        ("/v1/messages/count_tokens", {"messages": HI}),
        ("/tokenize", {"messages": HI}),
        ("/detokenize", {"tokens": [5]}),
    ],
)
def test_requests_and_answers_are_as_described(
    http: httpx.Client, model: str, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    """Breaks: a client that is generated from the document refuses what the server takes or gives."""
    operation = document["paths"][path]["post"]
    asked = validator(document, operation["requestBody"]["content"]["application/json"]["schema"])
    asked.validate({"model": model, **body})
    assert not asked.is_valid({"model": 5, **body})
    answer = http.post(path, json={"model": model, **body})
    assert answer.status_code == 200, answer.text
    validator(document, operation["responses"]["200"]["content"]["application/json"]["schema"]).validate(answer.json())


def test_fields_that_are_refused_are_not_described(document: dict[str, Any]) -> None:
    """Breaks: the page at /docs offers fields that every request is refused for."""
    described = document["components"]["schemas"]["ChatBody"]
    assert described["required"] == ["messages"]
    assert "functions" not in described["properties"] and "temperature" in described["properties"]


def test_every_reference_has_a_target(document: dict[str, Any], http: httpx.Client) -> None:
    """Breaks: /docs shows an error in place of a body."""
    text = http.get("/openapi.json").text
    assert {*re.findall('"#/components/schemas/([^"]+)"', text)} <= document["components"]["schemas"].keys()
