"""/v1/responses with the official client: whole and streamed responses, tools, structured output, and refused requests."""

import asyncio
import json
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, get_args

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel
from serve.live import Served

ASKED = "What is the weather in Paris?"
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
LOGPROBS = "message.output_text.logprobs"


def _engines_text(served: Served, messages: list[dict[str, Any]], count: int, **changes: Any) -> str | None:
    engine = served.engine
    prompt = engine.chat_prompt(messages)
    return engine.generate(prompt, engine.default_params(max_new_tokens=count, **changes))[0].text


# --- Whole responses


def test_a_text_is_answered(client: openai.OpenAI, model: str, served: Served) -> None:
    """Breaks: another text than the engine's, or a response that clients cannot read."""
    response = client.responses.create(
        model=model, input=ASKED, instructions="Be brief.", max_output_tokens=12, metadata={"job": "7"}, user="me", store=False
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED}]
    assert response.output_text == _engines_text(served, messages, 12)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert (response.object, response.model, response.error) == ("response", model, None)
    assert (response.metadata, response.user, response.instructions) == ({"job": "7"}, "me", "Be brief.")
    assert response.to_dict()["store"] is False and response.output[0].status == "incomplete"  # type: ignore[union-attr]
    usage = response.usage
    assert usage is not None and usage.output_tokens == 12 == usage.total_tokens - usage.input_tokens
    assert usage.input_tokens == len(served.engine.chat_prompt(messages)) and usage.output_tokens_details.reasoning_tokens == 0
    depth = usage.to_dict()["depth"]
    assert depth["num_layers"] == 4 and sum(depth["depths"].values()) == 12  # type: ignore[index]
    Response.model_validate(response.to_dict())  # the client itself reads anything


def test_a_text_that_ends_is_complete(client: openai.OpenAI, model: str, served: Served) -> None:
    """Breaks: clients go on asking for the rest of a text that has none."""
    whole = _engines_text(served, [{"role": "user", "content": ASKED}], 12)
    assert whole
    response = client.responses.create(model=model, input=ASKED, max_output_tokens=12, extra_body={"stop": whole[3:6]})
    assert (response.status, response.incomplete_details) == ("completed", None)
    assert response.output_text == whole[: whole.index(whole[3:6])] and response.to_dict()["completed_at"]


def test_a_conversation_is_the_chat_that_says_the_same(client: openai.OpenAI, model: str) -> None:
    """Breaks: turns, calls or results of functions reach the model in another form than from /v1/chat/completions."""
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather in "}, {"type": "input_text", "text": "Paris?"}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call", "call_id": "c2", "name": "get_weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "20 degrees"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "22 degrees"}]},
    ]  # fmt: skip
    call = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    calls = [
        {"id": "c1", "type": "function", "function": call},
        {"id": "c2", "type": "function", "function": {**call, "arguments": '{"city": "Rome"}'}},
    ]
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "20 degrees"},
        {"role": "tool", "tool_call_id": "c2", "content": "22 degrees"},
    ]
    response = client.responses.create(model=model, input=items, max_output_tokens=10)
    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=10)
    assert response.usage is not None and chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.output_text == chat.choices[0].message.content


def test_an_answer_can_be_sent_back(client: openai.OpenAI, model: str) -> None:
    """Breaks: the output of one response is refused as the input of the next, which is how clients continue a conversation."""
    items: list[Any] = [{"role": "user", "content": ASKED}]
    first = client.responses.create(
        model=model, input=items, max_output_tokens=40, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    )
    items += first.output
    items.append({"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sunny"})  # type: ignore[union-attr]
    second = client.responses.create(model=model, input=items, max_output_tokens=4, tools=[WEATHER], tool_choice="none")
    items += second.output
    assert client.responses.create(model=model, input=items, max_output_tokens=2).usage.output_tokens == 2  # type: ignore[union-attr]


def test_sampling_fields_reach_the_engine(client: openai.OpenAI, model: str, served: Served) -> None:
    """Breaks: a field is accepted and ignored."""
    messages = [{"role": "user", "content": ASKED}]
    sampled = {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "seed": 5, "presence_penalty": 0.5}
    sampled |= {"frequency_penalty": 0.25, "repetition_penalty": 1.1}
    extra = {name: value for name, value in sampled.items() if name not in ("temperature", "top_p")}
    response = client.responses.create(
        model=model, input=ASKED, max_output_tokens=16, temperature=0.9, top_p=0.8, extra_body=extra
    )
    assert response.output_text == _engines_text(served, messages, 16, **sampled)
    assert (response.temperature, response.top_p) == (0.9, 0.8)
    biased = client.responses.create(model=model, input=ASKED, max_output_tokens=3, extra_body={"logit_bias": {"70": 100}})
    assert biased.output_text == _engines_text(served, messages, 3, logit_bias=((70, 100.0),))


def test_log_probabilities_are_those_of_the_text(client: openai.OpenAI, model: str) -> None:
    """Breaks: wrong or missing log-probabilities."""
    response = client.responses.create(model=model, input=ASKED, max_output_tokens=6, top_logprobs=3, include=[LOGPROBS])
    entries = response.output[0].content[0].logprobs  # type: ignore[union-attr, index]
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": ASKED}], max_tokens=6, logprobs=True, top_logprobs=3
    )
    assert [entry.to_dict() for entry in entries] == [e.to_dict() for e in chat.choices[0].logprobs.content]  # type: ignore
    assert [len(entry.top_logprobs) for entry in entries] == [3] * 6


def test_json_schema(client: openai.OpenAI, model: str) -> None:
    """Breaks: `responses.parse` gives no object."""

    class Weather(BaseModel):
        sunny: bool
        city: Literal["Paris", "Rome"]

    parsed = client.responses.parse(model=model, input=ASKED, text_format=Weather, max_output_tokens=300)
    assert isinstance(parsed.output_parsed, Weather)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    response = client.responses.create(model=model, input=ASKED, text={"format": form}, max_output_tokens=100)  # type: ignore
    assert response.status == "completed" and json.loads(response.output_text)["a"] in (1, 2)
    assert response.text.to_dict()["format"]["schema"] == schema  # type: ignore[union-attr, index]


@pytest.mark.parametrize(
    "form, allowed",
    [({"type": "regex", "pattern": "(yes|no)"}, ("yes", "no")), ({"type": "lark", "grammar": 'start: "a" | "b"'}, ("a", "b"))],
)
def test_own_formats(client: openai.OpenAI, model: str, form: Any, allowed: tuple[str, ...]) -> None:
    """Breaks: the extensions of /v1/chat/completions are missing here."""
    assert client.responses.create(model=model, input=ASKED, text={"format": form}).output_text in allowed


def test_tools_are_called(client: openai.OpenAI, model: str) -> None:
    """Breaks: calls are not found, or in another form than clients read."""
    choice: Any = {"type": "function", "name": "get_weather"}
    response = client.responses.create(model=model, input=ASKED, tools=[WEATHER], tool_choice=choice, max_output_tokens=60)  # type: ignore
    assert response.status == "completed"
    [call] = response.output
    assert call.type == "function_call" and call.name == "get_weather" and json.loads(call.arguments)["city"] in ("Paris", "Rome")
    assert call.call_id and call.status == "completed" and response.tool_choice.to_dict() == choice  # type: ignore[union-attr]
    other: Any = {**WEATHER, "name": "other"}
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "other"}]}
    response = client.responses.create(
        model=model, input=ASKED, tools=[WEATHER, other], tool_choice=allowed, max_output_tokens=200, parallel_tool_calls=False
    )
    assert [call.name for call in response.output] == ["other"]  # type: ignore[union-attr]


# --- Streams

_EVENTS = {get_args(event.model_fields["type"].annotation)[0]: event for event in get_args(get_args(ResponseStreamEvent)[0])}


def _event(document: dict[str, Any]) -> Any:
    """The event as the type that the openai package has for it."""
    return _EVENTS[document["type"]].model_validate(document)


def _parsed(live_server: str, **body: Any) -> list[Any]:
    """The events as they are on the wire, validated: the client itself would read anything."""
    events = []
    with httpx.stream("POST", f"{live_server}/v1/responses", json={"stream": True, **body}, timeout=60) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        for block in answer.read().decode().strip().split("\n\n"):
            kind, data = block.split("\n")
            events.append(_event(json.loads(data.removeprefix("data: "))))
            assert kind == f"event: {events[-1].type}"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def test_a_streamed_text_has_all_events(client: openai.OpenAI, live_server: str, model: str) -> None:
    """Breaks: clients that wait for an event of OpenAI's sequence hang, or show another text."""
    events = _parsed(live_server, model=model, input=ASKED, max_output_tokens=8, include=[LOGPROBS], top_logprobs=1)
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    middle = ["output_text.delta"] * len(deltas)
    begun = ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds == [*begun, *middle, "output_text.done", "content_part.done", "output_item.done", "incomplete"]
    whole = client.responses.create(model=model, input=ASKED, max_output_tokens=8, include=[LOGPROBS], top_logprobs=1)
    last = events[-1].response
    assert "".join(event.delta for event in deltas) == events[-4].text == last.output_text == whole.output_text
    assert sum(len(event.logprobs) for event in deltas) == 8 == len(events[-4].logprobs)
    assert last.output[0].content[0].logprobs == whole.output[0].content[0].logprobs  # type: ignore[union-attr, index]
    assert len({event.item_id for event in deltas} | {last.output[0].id, events[2].item.id}) == 1
    assert events[0].response.status == "in_progress" and events[0].response.id == last.id
    for response in (last, whole):
        response.id = response.output[0].id = ""
        response.created_at = response.usage.input_tokens_details.cached_tokens = 0
        response.usage.depth = None
    assert last.to_dict() == whole.to_dict()


def test_a_streamed_call_has_all_events(live_server: str, model: str) -> None:
    """Breaks: agents do not see the call, or its arguments."""
    events = _parsed(
        live_server, model=model, input=ASKED, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False,
        max_output_tokens=60,
    )  # fmt: skip
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    added, delta, done, item = events[2:6]
    assert added.item.arguments == "" and delta.delta == done.arguments == item.item.arguments
    assert json.loads(done.arguments)["city"] in ("Paris", "Rome") and done.name == "get_weather"
    assert events[-1].response.output == [item.item]


def test_an_empty_text_is_a_message(live_server: str, client: openai.OpenAI, model: str) -> None:
    """Breaks: `output` is empty, and clients that take its first item fail."""
    ends_at_once = {"logit_bias": {"0": 100}}
    events = _parsed(live_server, model=model, input=ASKED, **ends_at_once)
    assert [part.text for part in events[-1].response.output[0].content] == [""]
    response = client.responses.create(model=model, input=ASKED, extra_body=ends_at_once)
    assert response.status == "completed" and response.output[0].content[0].text == ""  # type: ignore[union-attr, index]


def test_the_clients_stream_helpers(client: openai.OpenAI, live_server: str, model: str) -> None:
    """Breaks: the official client's own accumulation of a stream fails, sync or async."""
    with client.responses.stream(model=model, input=ASKED, max_output_tokens=8) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")

    async def streamed() -> str:
        async with openai.AsyncOpenAI(base_url=f"{live_server}/v1", api_key="none") as own:
            whole = await own.responses.create(model=model, input=ASKED, max_output_tokens=8)
            pieces = await own.responses.create(model=model, input=ASKED, max_output_tokens=8, stream=True)
            texts = [event.delta async for event in pieces if event.type == "response.output_text.delta"]
            assert "".join(texts) == whole.output_text
            return whole.output_text

    assert text == asyncio.run(streamed())


def test_litellm(client: openai.OpenAI, live_server: str, model: str) -> None:
    """Breaks: clients behind LiteLLM, which reads responses by types of its own."""
    import litellm

    wanted = client.responses.create(model=model, input=ASKED, max_output_tokens=16).output_text
    asked: Any = {"model": f"openai/{model}", "input": ASKED, "api_base": f"{live_server}/v1", "api_key": "none"}
    whole: Any = litellm.responses(**asked, max_output_tokens=16)
    assert whole.output[0].content[0].text == wanted and whole.usage.output_tokens == 16
    events: Any = litellm.responses(**asked, max_output_tokens=16, stream=True)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == wanted


def test_an_error_in_the_middle_ends_the_stream(serve_app: Callable[..., AbstractContextManager[Served]]) -> None:
    """Breaks: a client takes half of a text for the whole."""
    with serve_app() as served:
        url, model = served.url, served.engine.manifest.model.name
        body = {"model": model, "input": ASKED, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/responses", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            while not next(lines).startswith("event: response.output_text.delta"):
                pass
            served.engine.close(abort=True)
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    last = _event(events[-1])
    assert last.type == "response.failed" and last.response.error.code == "server_error"
    assert events[-2]["type"] == "response.output_item.done" and last.response.output[0].status == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(served: Served, model: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: requests that nobody waits for take the engine's time."""
    step = served.engine.policy.step
    monkeypatch.setattr(served.engine.policy, "step", lambda *work: time.sleep(0.02) or step(*work))  # about 10 s for the text
    body = {"model": model, "input": ASKED, "stream": stream, "ignore_eos": True}
    cancelled = _cancelled(served)
    with httpx.Client() as leaving:
        if stream:
            with leaving.stream("POST", f"{served.url}/v1/responses", json=body) as answer:
                next(answer.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaving.post(f"{served.url}/v1/responses", json=body, timeout=httpx.Timeout(20, read=0.1))
    deadline = time.monotonic() + 5
    while _cancelled(served) == cancelled:
        assert time.monotonic() < deadline, "the request goes on"
        time.sleep(0.01)


def _cancelled(served: Served) -> int:
    found = re.search(r'tide_requests_total\{reason="cancelled"\} (\d+)', served.engine.metrics())
    return int(found[1]) if found is not None else 0


# --- Refused requests

SCHEMA = {"type": "json_schema", "name": "a", "schema": {"type": "nonsense"}}
BAD = [
    ({"input": None}, "input"),
    ({"input": 7}, "input"),
    ({"input": []}, "input"),
    ({"input": "x " * 600}, "input"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"instructions": ["x"]}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "5"}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs"),
    ({"include": [LOGPROBS], "tools": [WEATHER]}, "include"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
    ({"text": {"format": SCHEMA}}, "text.format"),
    ({"text": {"format": {"type": "regex", "pattern": "("}}}, "text.format"),
    ({"tools": [{**WEATHER, "name": "no spaces"}]}, "tools[0].name"),
    ({"tools": [WEATHER, WEATHER]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"background": True}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"depth_policy": "exit"}, "depth_policy"),
    ({"n": 2}, "n"),
    ({"messages": []}, "messages"),
]


@pytest.mark.parametrize("fields, param", BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_done_is_refused(live_server: str, model: str, fields: dict[str, Any], param: str) -> None:
    """Breaks: a client's wish is ignored, or an error names no field, or a field of another endpoint."""
    answer = httpx.post(f"{live_server}/v1/responses", json={"model": model, "input": ASKED, "max_output_tokens": 2, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert not any(name in error["message"] for name in ("messages[", "response_format", "max_completion_tokens"))


HARMLESS: dict[str, Any] = {
    "background": False, "store": False, "truncation": "disabled", "service_tier": "auto", "reasoning": {}, "include": [],
    "previous_response_id": None, "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "y", "tools": [],
    "text": {"format": {"type": "text"}, "verbosity": "medium"}, "depth_policy": "auto", "parallel_tool_calls": True,
}  # fmt: skip


def test_what_happens_anyway_is_accepted(live_server: str, model: str) -> None:
    """Breaks: clients that send defaults explicitly are refused."""
    answer = httpx.post(f"{live_server}/v1/responses", json={"model": model, "input": ASKED, "max_output_tokens": 2, **HARMLESS})
    assert answer.status_code == 200, answer.text
    response = Response.model_validate(answer.json())
    assert (response.safety_identifier, response.prompt_cache_key) == ("x", "y")
