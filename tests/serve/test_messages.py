"""/v1/messages and /v1/messages/count_tokens with Anthropic's client. test_transcripts.py has whole answers and streams."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import Message
from anthropic.types.shared import ErrorResponse
from serve.live import Served
from tide_serve.api.messages import call_input

ASKED = "What is the weather in Paris?"
ASK: Any = [{"role": "user", "content": ASKED}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CACHED: Any = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.fixture(scope="module")
def claude(live_server: str) -> Iterator[anthropic.Anthropic]:
    """Anthropic's own client, which does not try again where it failed."""
    with anthropic.Anthropic(base_url=live_server, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def _engines_text(served: Served, messages: list[dict[str, Any]], count: int, **changes: Any) -> str | None:
    engine = served.engine
    return engine.generate(engine.chat_prompt(messages), engine.default_params(max_new_tokens=count, **changes))[0].text


def _text(message: Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


# --- Whole messages


def test_cached_tokens_are_not_input_tokens(claude: anthropic.Anthropic, model: str) -> None:
    """Breaks: a client adds up tokens that were not computed."""
    asked: Any = [{"role": "user", "content": "Count the cached tokens of this text, please. " * 4}]
    first, again = [claude.messages.create(model=model, max_tokens=1, messages=asked).usage for _ in range(2)]
    assert first.cache_read_input_tokens == 0 < (again.cache_read_input_tokens or 0)
    assert first.input_tokens == again.input_tokens + (again.cache_read_input_tokens or 0)
    assert claude.messages.count_tokens(model=model, messages=asked).input_tokens == first.input_tokens


def test_a_full_context_is_no_limit_of_the_client(claude: anthropic.Anthropic, model: str) -> None:
    """Breaks: clients take a full context for their own limit."""
    full: Any = {"ignore_eos": True}
    message = claude.messages.create(model=model, max_tokens=100_000, messages=ASK, extra_body=full)
    assert message.stop_reason == "model_context_window_exceeded"


def test_a_conversation_is_the_chat_that_says_the_same(claude: anthropic.Anthropic, client: openai.OpenAI, model: str) -> None:
    """Breaks: turns, calls or results of tools reach the model in another form than from /v1/chat/completions, or what a client
    says about caching and accounts changes the prompt."""
    accounts = "x-anthropic-billing-header: cc_version=2.1.0; cch=1f2e3;"
    system: Any = [
        {"type": "text", "text": accounts},
        {"type": "text", "text": "Be brief.", **CACHED},
        {"type": "text", "text": "Ok?"},
    ]
    turns: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Weather in", **CACHED}, {"type": "text", "text": "Paris?"}]},
        {"role": "user", "content": "And Rome?"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "x"},
            {"type": "text", "text": "I look.", "citations": None},
            {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Paris"}},
            {"type": "tool_use", "id": "c2", "name": "get_weather", "input": {"city": "Rome"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "20 degrees"},
            {"type": "tool_result", "tool_use_id": "c2", "is_error": True, "content": [{"type": "text", "text": "no such city"}]},
            {"type": "text", "text": "Well?"},
        ]},
        {"role": "system", "content": "Go on."},
    ]  # fmt: skip
    calls: Any = [
        {"id": name, "type": "function", "function": {"name": "get_weather", "arguments": json.dumps({"city": city})}}
        for name, city in (("c1", "Paris"), ("c2", "Rome"))
    ]
    messages: Any = [
        {"role": "system", "content": "Be brief.\nOk?"},
        {"role": "user", "content": "Weather in\nParis?\nAnd Rome?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "20 degrees"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: no such city"},
        {"role": "user", "content": "Well?"},
        {"role": "system", "content": "Go on."},
    ]
    message = claude.messages.create(
        model=model, system=system, messages=turns, max_tokens=10, cache_control=CACHED["cache_control"]
    )
    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=10)
    assert chat.usage is not None
    counted = claude.messages.count_tokens(model=model, system=system, messages=turns)
    assert counted.input_tokens == chat.usage.prompt_tokens and _text(message) == chat.choices[0].message.content
    tools = claude.messages.count_tokens(model=model, system=system, messages=turns, tools=[WEATHER])
    none = claude.messages.count_tokens(model=model, system=system, messages=turns, tools=[WEATHER], tool_choice={"type": "none"})
    assert tools.input_tokens > none.input_tokens == counted.input_tokens


def test_sampling_fields_reach_the_engine(claude: anthropic.Anthropic, model: str, served: Served) -> None:
    """Breaks: a field is accepted and ignored."""
    sampled = {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "seed": 5, "presence_penalty": 0.5}
    sampled |= {"frequency_penalty": 0.25, "repetition_penalty": 1.1}
    message = claude.messages.create(model=model, max_tokens=16, messages=ASK, extra_body=sampled)
    assert _text(message) == _engines_text(served, ASK, 16, **sampled)
    biased: Any = {"logit_bias": {"70": 100}}
    message = claude.messages.create(model=model, max_tokens=3, messages=ASK, extra_body=biased)
    assert _text(message) == _engines_text(served, ASK, 3, logit_bias=((70, 100.0),))


# --- Refused requests

INVALID = "invalid_request_error"


def test_other_errors_have_anthropics_types(http: httpx.Client, model: str) -> None:
    """Breaks: a client cannot tell a wrong model, body or method from each other."""
    asked = {"model": model, "messages": ASK, "max_tokens": 2}

    def kind(answer: httpx.Response) -> tuple[int, str]:
        return answer.status_code, ErrorResponse.model_validate(answer.json(), strict=True).error.type

    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = asked if path == "/v1/messages" else {**asked, "max_tokens": None}
        assert http.post(path, json=body).status_code == 200
        assert http.post(path, json={**body, "model": "other"}).status_code == 200
        assert kind(http.post(path, content=b"{", headers={"Content-Type": "application/json"})) == (400, INVALID)
        assert kind(http.post(path, content=b"x=1")) == (415, INVALID)
        assert kind(http.get(path)) == (405, INVALID)
    assert kind(http.post("/v1/messages/batches", json=asked)) == (404, "not_found_error")
    assert kind(http.get("/v1/models/other", headers={"anthropic-version": "2023-06-01"})) == (404, "not_found_error")


def test_half_a_surrogate_pair_in_arguments_is_replaced() -> None:
    """The answer could not be encoded: a client would see its connection break."""
    assert call_input('{"a": "x\\ud83d", "b": "\\ud83d\\ude00"}') == {"a": "x\ufffd", "b": "\U0001f600"}
