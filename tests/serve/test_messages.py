"""/v1/messages and /v1/messages/count_tokens with Anthropic's client: whole and streamed, tools, structured output, refusals."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, get_args

import anthropic
import httpx
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from serve.live import Served

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
ONE: Any = {"type": "any", "disable_parallel_tool_use": True}
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


def test_a_text_is_answered(claude: anthropic.Anthropic, model: str, served: Served) -> None:
    """Breaks: another text than the engine's, or a message that clients cannot read."""
    message = claude.messages.create(
        model=model, max_tokens=12, system="Be brief.", messages=ASK, metadata={"user_id": "me"}, service_tier="auto"
    )
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED}]
    assert _text(message) == _engines_text(served, chat, 12)
    assert (message.type, message.role, message.model) == ("message", "assistant", model)
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None) and message.id.startswith("msg_")
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(served.engine.chat_prompt(chat))
    assert (usage.output_tokens, usage.cache_creation_input_tokens) == (12, 0)
    assert sum(usage.to_dict()["depth"]["depths"].values()) == 12  # type: ignore[index]
    Message.model_validate(message.to_dict(), strict=True)  # the client itself reads anything


def test_cached_tokens_are_not_input_tokens(claude: anthropic.Anthropic, model: str) -> None:
    """Breaks: a client adds up tokens that were not computed."""
    asked: Any = [{"role": "user", "content": "Count the cached tokens of this text, please. " * 4}]
    first, again = [claude.messages.create(model=model, max_tokens=1, messages=asked).usage for _ in range(2)]
    assert first.cache_read_input_tokens == 0 < (again.cache_read_input_tokens or 0)
    assert first.input_tokens == again.input_tokens + (again.cache_read_input_tokens or 0)
    assert claude.messages.count_tokens(model=model, messages=asked).input_tokens == first.input_tokens


def test_why_it_ended(claude: anthropic.Anthropic, model: str, served: Served) -> None:
    """Breaks: clients go on asking for the rest of a text that has none, or take a full context for their own limit."""
    whole = _engines_text(served, ASK, 12)
    assert whole
    message = claude.messages.create(model=model, max_tokens=12, messages=ASK, stop_sequences=["zzz", whole[3:6]])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", whole[3:6])
    assert _text(message) == whole[: whole.index(whole[3:6])]
    ends_at_once: Any = {"logit_bias": {"0": 100}}
    message = claude.messages.create(model=model, max_tokens=12, messages=ASK, extra_body=ends_at_once)
    assert (message.stop_reason, _text(message), len(message.content)) == ("end_turn", "", 1)
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


def test_structured_output(claude: anthropic.Anthropic, model: str) -> None:
    """Breaks: an answer that does not parse."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    message = claude.messages.create(
        model=model, max_tokens=100, messages=ASK, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert message.stop_reason == "end_turn" and json.loads(_text(message))["a"] in (1, 2)


# --- Tools


def test_tools_are_called(claude: anthropic.Anthropic, model: str) -> None:
    """Breaks: calls are not found, in another form than clients read, or the conversation cannot go on from them."""
    other = {**WEATHER, "name": "other", "strict": True, "type": "custom", **CACHED}
    choice: Any = {"type": "tool", "name": "other"}
    asked: Any = {"model": model, "max_tokens": 80, "tools": [WEATHER, other]}
    message = claude.messages.create(**asked, messages=ASK, tool_choice=choice)
    [call] = message.content
    assert call.type == "tool_use" and call.name == "other" and call.input["city"] in ("Paris", "Rome")
    assert message.stop_reason == "tool_use"
    turns: Any = [*ASK, {"role": "assistant", "content": message.content}]
    turns.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]})
    message = claude.messages.create(**asked, messages=turns, tool_choice=ONE)
    assert [block.type for block in message.content] == ["tool_use"]
    turns.append(message.to_param())
    turns.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": message.content[0].id}]})  # type: ignore[union-attr]
    assert claude.messages.create(**asked, messages=turns, tool_choice={"type": "none"}).stop_reason != "tool_use"


# --- Streams

_EVENTS = {get_args(event.model_fields["type"].annotation)[0]: event for event in get_args(get_args(RawMessageStreamEvent)[0])}


def _parsed(live_server: str, **body: Any) -> list[Any]:
    """The events as they are on the wire, validated: the client itself would read anything."""
    events = []
    with httpx.stream("POST", f"{live_server}/v1/messages", json={"stream": True, **body}, timeout=60) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        for block in answer.read().decode().strip().split("\n\n"):
            kind, data = block.split("\n")
            document = json.loads(data.removeprefix("data: "))
            events.append(_EVENTS[document["type"]].model_validate(document, strict=True))
            assert kind == f"event: {events[-1].type}"
    return events


def test_a_streamed_text_has_all_events(claude: anthropic.Anthropic, live_server: str, model: str) -> None:
    """Breaks: clients that wait for an event of Anthropic's sequence hang, or show another text."""
    events = _parsed(live_server, model=model, messages=ASK, max_tokens=8)
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    middle = ["content_block_delta"] * len(deltas)
    assert [event.type for event in events] == [
        "message_start", "content_block_start", *middle, "content_block_stop", "message_delta", "message_stop",
    ]  # fmt: skip
    whole = claude.messages.create(model=model, messages=ASK, max_tokens=8)
    assert deltas and "".join(deltas) == _text(whole)  # tokens that are there together share a delta
    ending = events[-2]
    assert (ending.delta.stop_reason, ending.usage.output_tokens) == ("max_tokens", 8)
    read = ending.usage.cache_read_input_tokens
    assert events[0].message.usage.input_tokens == ending.usage.input_tokens + read == whole.usage.input_tokens + read


def test_the_clients_stream_helpers(claude: anthropic.Anthropic, live_server: str, model: str) -> None:
    """Breaks: the official client's own accumulation of a stream fails, sync or async, or has another message than a whole."""
    asked: Any = {"model": model, "max_tokens": 60, "messages": ASK, "tools": [WEATHER], "tool_choice": ONE}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        message = stream.get_final_message()

    async def streamed() -> Message:
        own = anthropic.AsyncAnthropic(base_url=live_server, api_key="none")
        async with own, own.messages.stream(**asked) as stream:
            return await stream.get_final_message()

    for other in (message, asyncio.run(streamed())):
        assert [(block.name, block.input) for block in other.content] == [(b.name, b.input) for b in whole.content]  # type: ignore
        assert (other.stop_reason, other.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)


def test_an_empty_text_is_a_block(live_server: str, model: str) -> None:
    """Breaks: clients that take the first block fail."""
    events = _parsed(live_server, model=model, messages=ASK, max_tokens=8, logit_bias={"0": 100})
    kinds = ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert [event.type for event in events] == kinds and events[-2].delta.stop_reason == "end_turn"


def test_an_error_in_the_middle_ends_the_stream(serve_app: Callable[..., AbstractContextManager[Served]]) -> None:
    """Breaks: a client takes half of a text for the whole."""
    with serve_app() as served, anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as claude:
        name = served.engine.manifest.model.name
        stream = claude.messages.create(model=name, max_tokens=400, messages=ASK, stream=True, extra_body={"ignore_eos": True})
        with pytest.raises(anthropic.APIStatusError) as failed:
            for event in stream:
                if event.type == "content_block_delta":
                    served.engine.close(abort=True)
    assert ErrorResponse.model_validate(failed.value.body).error.type in ("overloaded_error", "api_error")


# --- Refused requests

INVALID = "invalid_request_error"
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": "x"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": "x " * 600}]}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": "x"}]}]},
     "messages[0].content[0].tool_use_id"),
    ({"messages": [*ASK, {"role": "assistant", "content": " "}]}, "messages"),
    ({"system": 7}, "system"),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{**WEATHER, "name": "no spaces"}]}, "tools[0].name"),
    ({"tools": [{**WEATHER, "strict": True, "input_schema": {"type": "nothing"}}]}, "tools"),
    ({"tools": [{**WEATHER, "input_schema": {"enum": ["x" * 70_000]}}]}, "tools[0].input_schema"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"thinking": {"type": "between_tools"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}}, "output_config.format"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"stream": "yes"}, "stream"),
    ({"depth_policy": "exit"}, "depth_policy"),
    ({"n": 2}, "n"),
    ({"stop": "x"}, "stop"),
]  # fmt: skip


@pytest.mark.parametrize("fields, name", BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_done_is_refused(http: httpx.Client, model: str, fields: dict[str, Any], name: str) -> None:
    """Breaks: a client's wish is ignored, or an error has another API's form, names no field, or a field of another API."""
    answer = http.post("/v1/messages", json={"model": model, "messages": ASK, "max_tokens": 2, **fields})
    error = ErrorResponse.model_validate(answer.json(), strict=True).error
    assert (answer.status_code, error.type) == (400, INVALID), answer.text
    assert name in error.message and len(error.message) > 15, error
    for other in (".function", ".parameters", "response_format", "max_completion_tokens", "reasoning"):
        assert other not in error.message


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


def test_what_happens_anyway_is_accepted(claude: anthropic.Anthropic, model: str) -> None:
    """Breaks: clients that send defaults explicitly are refused."""
    harmless: Any = {
        "output_config": {}, "thinking": {"type": "adaptive"}, "speed": "standard",
        "service_tier": "standard_only", "cache_control": CACHED["cache_control"], "metadata": {"user_id": None}, "tools": [],
        "stop_sequences": [], "container": "x", "depth_policy": "auto", "mcp_servers": [],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }  # fmt: skip
    tool = {**WEATHER, "eager_input_streaming": True, "defer_loading": False, "allowed_callers": ["direct"], "type": None}
    made = claude.messages.create(model=model, max_tokens=2, messages=ASK, extra_body=harmless)
    assert made.usage.output_tokens == 2
    assert claude.messages.create(model=model, max_tokens=2, messages=ASK, tools=[tool]).usage.output_tokens == 2  # type: ignore
