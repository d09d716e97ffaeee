"""/v1/responses with the official client: whole and streamed responses, tools, structured output, and refused requests."""

import json
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, get_args

import httpx
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from serve.live import Served

ASKED = "What is the weather in Paris?"


def _engines_text(served: Served, messages: list[dict[str, Any]], count: int, **changes: Any) -> str | None:
    engine = served.engine
    prompt = engine.chat_prompt(messages)
    return engine.generate(prompt, engine.default_params(max_new_tokens=count, **changes))[0].text


# --- Whole responses


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


# --- Streams

_EVENTS = {get_args(event.model_fields["type"].annotation)[0]: event for event in get_args(get_args(ResponseStreamEvent)[0])}


def _event(document: dict[str, Any]) -> Any:
    """The event as the type that the openai package has for it."""
    return _EVENTS[document["type"]].model_validate(document)


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
