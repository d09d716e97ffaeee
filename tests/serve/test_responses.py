"""Conversations and sampling fields of /v1/responses. test_transcripts.py has whole answers and streams."""

from typing import Any

import openai
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
