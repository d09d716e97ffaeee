"""Limits of `ServeConfig` on a request's fields: each is refused by its name, and what is within them is not."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
from serve.live import Served
from tide_serve import ServeConfig

CONFIG = ServeConfig(
    max_tokens=5, max_choices=2, max_stop_strings=1, max_stop_chars=3, max_schema_bytes=60, max_schema_depth=3
)  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}}


@pytest.fixture(scope="module")
def ask(serve_app: Callable[..., AbstractContextManager[Served]]) -> Iterator[Any]:
    """A chat with a server of narrow limits."""
    with serve_app(CONFIG) as served, httpx.Client(base_url=served.url) as http:

        def ask(**fields: Any) -> Any:
            body = {"model": "tiny-chat", "messages": [{"role": "user", "content": "Hi"}], "ignore_eos": True, **fields}
            return http.post("/v1/chat/completions", json=body).json()

        yield ask


def test_texts_that_cannot_fit_are_not_tokenized(
    serve_app: Callable[..., AbstractContextManager[Served]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks: a prompt of megabytes takes a second of processor time before it is refused."""

    def encode(*_: object) -> list[int]:
        raise AssertionError("the text was tokenized")

    with serve_app() as served, httpx.Client(base_url=served.url) as http:
        tokenizer, context = served.engine.tokenizer, served.engine.manifest.max_seq_len
        assert tokenizer is not None and tokenizer.bound.longest is not None
        monkeypatch.setattr(tokenizer, "encode", encode)
        text = "ab " * (context * tokenizer.bound.longest // 3 + 1)
        for path, field in (
            ("completions", {"prompt": text}),
            ("chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ):
            error = http.post(f"/v1/{path}", json={"model": "tiny-chat", **field}).json()["error"]
            assert (error["param"], error["code"]) == (*field, "context_length_exceeded")
            assert "at least" in error["message"] and "--max-seq-len" in error["message"]
        too_many = http.post("/v1/completions", json={"model": "tiny-chat", "prompt": ["a"] * 17}).json()["error"]
        assert too_many["param"] == "prompt" and "17 prompts" in too_many["message"]


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


def test_the_limit_of_tokens_is_the_default(ask: Any) -> None:
    """Breaks: a server's limit on tokens does not hold for requests that name none."""
    assert ask()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 5}, {"n": 2}, {"stop": ["abc"]}, schema(SCHEMA), tool(SCHEMA)],
    ids=["max_tokens", "n", "stop", "schema", "tool"],
)
def test_within_the_limits(ask: Any, fields: dict[str, Any]) -> None:
    """Breaks: a limit is one lower than it says."""
    assert "error" not in ask(**fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 6}, "max_tokens"),
        ({"max_completion_tokens": 6}, "max_completion_tokens"),
        ({"n": 3}, "n"),
        ({"stop": ["a", "b"]}, "stop"),
        ({"stop": "abcd"}, "stop"),
        (schema({**SCHEMA, "title": "x" * 20}), "response_format"),
        (schema({"allOf": [{"allOf": [{}]}]}), "response_format"),
        ({"response_format": {"type": "regex", "pattern": "a" * 61}}, "response_format"),
        (tool({**SCHEMA, "title": "x" * 20}), "tools[0].function.parameters"),
    ],
)
def test_beyond_the_limits(ask: Any, fields: dict[str, Any], param: str) -> None:
    """Breaks: a limit of the server does not hold, or the client is not told which."""
    error = ask(**fields)["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
