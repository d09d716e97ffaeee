"""``response_format``: outputs that follow a schema, a pattern or a grammar."""

import json
from typing import Any

import jsonschema
import openai
import pytest

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


def test_json_object(client: openai.OpenAI, model: str) -> None:
    """Breaks: JSON mode gives text. The random model's object may not end; its beginning is JSON all the same."""
    text, reason = ask(client, model, {"type": "json_object"}, max_tokens=40)
    assert text.startswith("{") and (reason == "length" or json.loads(text) is not None)
