"""Requests that cannot be answered: each is refused with OpenAI's error object and the field's name, and harms no other."""

import json
from typing import Any

import httpx
import pytest
from serve.live import Served

HI = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"messages": HI, "max_tokens": 2}
TEXT: dict[str, Any] = {"prompt": "Hi", "max_tokens": 2}
INVALID, MISSING = "invalid_request_error", "not_found_error"


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def json_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def user(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **fields}]}


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
CALL = {"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}}

# Fields that make a chat request wrong, and the `param` of its error.
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [*HI, {"role": "robot", "content": "Hi"}]}, "messages[1].role"),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    ({"continue_final_message": True}, "messages"),
    ({"add_generation_prompt": False}, "add_generation_prompt"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages[0].tool_calls[0].type"),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio"),
    (user(None), "messages[0].content"),
    (user(5), "messages[0].content"),
    (user([{"type": "text", "text": 5}]), "messages[0].content[0].text"),
    (user([{"type": "text", "text": "What is this?"}, IMAGE]), "messages[0].content[1].type"),
    (user("The sky is blue. " * 400), "messages"),
    ({"model": 5}, "model"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"min_p": -0.5}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"70": 101}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(2000)}}, "logit_bias"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 2.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 257}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": ["x" * 100] * 1000}, "stop"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"format": "mp3", "voice": "alloy"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"chat_template": "x"}, "chat_template"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"function_call": "auto"}, "function_call"),
    ({"depth_policy": "exit"}, "depth_policy"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (json_schema({"type": "nothing"}), "response_format"),
    (json_schema(nested(20)), "response_format"),
    (json_schema(nested(90)), "response_format"),
    (json_schema({"enum": ["x" * 70_000]}), "response_format"),
    ({"response_format": {"type": "regex", "pattern": "("}}, "response_format"),
    ({"response_format": {"type": "lark", "grammar": "nothing"}}, "response_format"),
    ({"response_format": {"type": "regex", "pattern": "a"}, "tools": [function(strict=True)]}, "response_format"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [function(name="a b")]}, "tools[0].function.name"),
    ({"tools": [function(), function()]}, "tools"),
    ({"tools": [function(parameters=nested(20))]}, "tools[0].function.parameters"),
    ({"tools": [function(parameters={"type": "nothing"}, strict=True)]}, "tools"),
    ({"tools": [function(parameters={"type": "array", "uniqueItems": True}, strict=True)]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [function()], "tool_choice": function(name="g")}, "tool_choice"),
    ({"tools": [function()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
    (
        {
            "tools": [function()],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"function": 5}]}},
        },
        "tool_choice",
    ),
]  # fmt: skip

TEXTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [70, "x"]}, "prompt[1]"),
    ({"prompt": [70, 99999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [70] * 513}, "prompt"),
    ({"prompt": "The sky is blue. " * 400}, "prompt"),
    ({"prompt": ["a"] * 17}, "prompt"),
    ({"prompt": ["a"] * 9, "n": 2}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"echo": 1}, "echo"),
    ({"messages": HI}, "messages"),
]

# Bodies that are no JSON object, or not of the right kind.
RAW: list[tuple[bytes, str, int]] = [
    (b"", "application/json", 400),
    (b"{", "application/json", 400),
    (b"[]", "application/json", 400),
    (b'{"model": "x\xff"}', "application/json", 400),
    (b'{"model": "\\ud800"}', "application/json", 400),
    (b'{"temperature": NaN}', "application/json", 400),
    (b"[" * 100_000, "application/json", 400),
    (b'{"n": ' + b"9" * 5000 + b"}", "application/json", 400),
    (b"model=x", "application/x-www-form-urlencoded", 415),
    (b"{}", "text/plain", 415),
]


def refused(answer: httpx.Response, status: int, kind: str, param: str | None) -> None:
    """Check an error answer; its message must be a sentence that does not show the server's inside."""
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (status, kind, param), answer.text
    assert len(error["message"]) > 15 and "Traceback" not in error["message"] and len(answer.content) < 2000


@pytest.fixture(autouse=True)
def alive(served: Served, http: httpx.Client, model: str) -> Any:
    """The next request is answered, and no generation was left running."""
    yield
    answer = http.post("/v1/completions", json={"model": model, **TEXT})
    assert answer.status_code == 200
    served.wait_idle()


@pytest.mark.parametrize(("fields", "param"), CHATS, ids=[f"{p}-{json.dumps(f)[:40]}" for f, p in CHATS])
def test_bad_chats(http: httpx.Client, model: str, fields: dict[str, Any], param: str) -> None:
    """Breaks: a mistake is ignored, blamed on another field, or ends in a 500."""
    body = {"model": model, **CHAT, **fields}
    refused(http.post("/v1/chat/completions", json=body), 400, INVALID, param)


@pytest.mark.parametrize(("fields", "param"), TEXTS, ids=[f"{p}-{json.dumps(f)[:40]}" for f, p in TEXTS])
def test_bad_completions(http: httpx.Client, model: str, fields: dict[str, Any], param: str) -> None:
    """Breaks: a mistake is ignored, blamed on another field, or ends in a 500."""
    body = {"model": model, **TEXT, **fields}
    refused(http.post("/v1/completions", json=body), 400, INVALID, param)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(("body", "kind", "status"), RAW, ids=[str(body[:30]) for body, _, _ in RAW])
def test_bad_bodies(http: httpx.Client, path: str, body: bytes, kind: str, status: int) -> None:
    """Breaks: bytes that are no request reach a route, or end in a 500."""
    refused(http.post(path, content=body, headers={"Content-Type": kind}), status, INVALID, None)


def test_an_only_model_has_any_name(http: httpx.Client, model: str) -> None:
    """Breaks: an agent that is set up for another model's name, or for none, gets 404; or it is told that it got that model."""
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
        for fields in ({"model": "gpt-4"}, {"model": None}, {}):
            assert http.post(path, json={**body, **fields}).json()["model"] == model
    refused(http.get("/v1/models/gpt-4"), 404, MISSING, "model")


def test_codes(http: httpx.Client, model: str) -> None:
    """Breaks: programs that tell by the code whether to shorten the prompt or to drop a field."""

    def code(**fields: Any) -> str:
        body = {"model": model, **CHAT, **fields}
        answer: str = http.post("/v1/chat/completions", json=body).json()["error"]["code"]
        return answer

    assert code(**user("The sky is blue. " * 400)) == "context_length_exceeded"
    assert code(min_tokens=1) == "unsupported_parameter"
    assert code(temperature="hot") == "invalid_type"
    assert code(response_format={"type": "regex", "pattern": "("}) == "invalid_grammar"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
)
def test_bad_texts_and_tokens(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    """Breaks: a mistake ends in a 500, or in other tokens."""
    refused(http.post(path, json=body), 400, INVALID, param)


def test_table_is_long_enough() -> None:
    """Breaks: the promise that sixty bad requests are tried."""
    assert len(CHATS) + len(TEXTS) + len(RAW) >= 60
