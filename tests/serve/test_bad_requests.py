"""Requests that cannot be answered: each is refused with OpenAI's error object and the field's name, and harms no other."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.types.shared import ErrorResponse
from serve.live import Served

HI = [{"role": "user", "content": "Hi"}]
# What makes a right body of each route.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI, "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
    "/tokenize": {},
    "/detokenize": {},
}
INVALID, MISSING = "invalid_request_error", "not_found_error"
# Route, the fields that make its request wrong, and the `param` of its error; see `written_out`.
REFUSED: list[tuple[str, dict[str, Any], str]] = json.loads(Path(__file__).with_name("refused.json").read_text(encoding="utf-8"))
# Names that an error of a route must not have, as they are of another one.
FOREIGN = {
    "/v1/messages": (".function", ".parameters", "response_format", "max_completion_tokens", "reasoning"),
    "/v1/responses": ("messages[", "response_format", "max_completion_tokens"),
}


def written_out(value: Any) -> Any:
    """``value`` with ``{"$repeat": [text or list, count]}`` and ``{"$nested": levels}``, a schema, as what they stand for."""
    if isinstance(value, list):
        return [written_out(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "$repeat" in value:
        part, count = value["$repeat"]
        return written_out(part) * count
    if "$nested" in value:
        schema: dict[str, Any] = {"type": "string"}
        for _ in range(value["$nested"]):
            schema = {"type": "object", "properties": {"a": schema}}
        return schema
    return {name: written_out(one) for name, one in value.items()}


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
    answer = http.post("/v1/completions", json={"model": model, **BODIES["/v1/completions"]})
    assert answer.status_code == 200
    served.wait_idle()


@pytest.mark.parametrize(("path", "fields", "param"), REFUSED, ids=[f"{path} {p} {str(f)[:40]}" for path, f, p in REFUSED])
def test_what_cannot_be_done_is_refused(http: httpx.Client, model: str, path: str, fields: dict[str, Any], param: str) -> None:
    """Breaks: a mistake is ignored, blamed on another field or one of another API, has another API's form, or ends in a 500."""
    answer = http.post(path, json={"model": model, **BODIES[path], **written_out(fields)})
    if path == "/v1/messages":
        error = ErrorResponse.model_validate(answer.json(), strict=True).error
        assert (answer.status_code, error.type) == (400, INVALID) and param in error.message and len(error.message) > 15
    else:
        refused(answer, 400, INVALID, param)
    assert not any(name in answer.json()["error"]["message"] for name in FOREIGN.get(path, ()))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(("body", "kind", "status"), RAW, ids=[str(body[:30]) for body, _, _ in RAW])
def test_bad_bodies(http: httpx.Client, path: str, body: bytes, kind: str, status: int) -> None:
    """Breaks: bytes that are no request reach a route, or end in a 500."""
    refused(http.post(path, content=body, headers={"Content-Type": kind}), status, INVALID, None)


def test_an_only_model_has_any_name(http: httpx.Client, model: str) -> None:
    """Breaks: an agent that is set up for another model's name, or for none, gets 404; or it is told that it got that model."""
    for path in ("/v1/chat/completions", "/v1/completions"):
        for fields in ({"model": "gpt-4"}, {"model": None}, {}):
            assert http.post(path, json={**BODIES[path], **fields}).json()["model"] == model
    refused(http.get("/v1/models/gpt-4"), 404, MISSING, "model")


def test_codes(http: httpx.Client, model: str) -> None:
    """Breaks: programs that tell by the code whether to shorten the prompt or to drop a field."""

    def code(**fields: Any) -> str:
        path = "/v1/chat/completions"
        answer: str = http.post(path, json={"model": model, **BODIES[path], **fields}).json()["error"]["code"]
        return answer

    assert code(messages=[{"role": "user", "content": "The sky is blue. " * 400}]) == "context_length_exceeded"
    assert code(min_tokens=1) == "unsupported_parameter"
    assert code(temperature="hot") == "invalid_type"
    assert code(response_format={"type": "regex", "pattern": "("}) == "invalid_grammar"
