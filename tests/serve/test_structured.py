"""``response_format``: outputs that follow a schema, a pattern or a grammar."""

import json
import re
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel
from serve.sse import parsed, raw_events

ASK = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "é"]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "inner": {"$ref": "#/$defs/inner"},
    },
    "required": ["size", "kind", "flags", "inner"],
    "additionalProperties": False,
    "$defs": {
        "inner": {"type": "object", "properties": {"x": {"const": None}}, "required": ["x"], "additionalProperties": False}
    },
}


def form(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "made", "schema": schema, **more}}


def ask(client: openai.OpenAI, model: str, response_format: Any, **fields: Any) -> tuple[str, str]:
    fields = {"max_tokens": 200, "temperature": 1.0, **fields}
    [choice] = client.chat.completions.create(model=model, messages=ASK, response_format=response_format, **fields).choices  # type: ignore[call-overload]
    return choice.message.content, choice.finish_reason


@pytest.mark.parametrize("strict", [None, False, True])
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_valid(client: openai.OpenAI, model: str, seed: int, strict: bool | None) -> None:
    """Breaks: an answer out of the schema, which the client's program does not expect."""
    text, reason = ask(client, model, form(SCHEMA, strict=strict), seed=seed)
    assert reason == "stop"
    jsonschema.validate(json.loads(text), SCHEMA)


def test_a_stream_is_valid(http: httpx.Client, model: str) -> None:
    """Breaks: structure is enforced in whole answers only."""
    body = {"model": model, "messages": ASK, "response_format": form(SCHEMA), "max_tokens": 200, "temperature": 1.0, "seed": 2}
    events = parsed(raw_events(http, "/v1/chat/completions", body))
    jsonschema.validate(json.loads("".join(e["choices"][0]["delta"].get("content", "") for e in events)), SCHEMA)


def test_the_clients_own_types(client: openai.OpenAI, model: str) -> None:
    """Breaks: `client.chat.completions.parse` with a pydantic model, which makes the schema itself."""

    class Point(BaseModel):
        x: bool
        y: bool

    made = client.chat.completions.parse(model=model, messages=ASK, response_format=Point, max_tokens=60, temperature=1.0)  # type: ignore[arg-type]
    assert isinstance(made.choices[0].message.parsed, Point)


def test_json_object(client: openai.OpenAI, model: str) -> None:
    """Breaks: JSON mode gives text. The random model's object may not end; its beginning is JSON all the same."""
    text, reason = ask(client, model, {"type": "json_object"}, max_tokens=40)
    assert text.startswith("{") and (reason == "length" or json.loads(text) is not None)


def test_extensions(client: openai.OpenAI, model: str) -> None:
    """Breaks: the documented forms `regex` and `lark` are refused or not enforced."""
    text, _ = ask(client, model, {"type": "regex", "pattern": "[0-9]{2,5}-(a|b)"})
    assert re.fullmatch("[0-9]{2,5}-(a|b)", text)
    text, _ = ask(client, model, {"type": "lark", "grammar": 'start: ("x" | "y")+ "!"'})
    assert re.fullmatch("[xy]+!", text) or re.fullmatch("[xy]+", text)


def test_completions_take_formats(client: openai.OpenAI, model: str) -> None:
    """Breaks: structure is possible in chats only."""
    extra = {"response_format": {"type": "regex", "pattern": "ab+c"}}
    made = client.completions.create(model=model, prompt="def", max_tokens=30, extra_body=extra)
    assert re.match("ab+", made.choices[0].text)
