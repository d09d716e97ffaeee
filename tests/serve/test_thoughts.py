"""Thoughts of a model that thinks aloud, on their way to a client: apart from the answer, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from serve.live import Served, serving
from serve.scripted_model import make_scripted_bundle
from serve.sse import parsed, raw_events

# The model's answer depends on the last token only, so a turn has no marks, and thoughts follow the user's text.
TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' and loop.last %}
        {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' + message.content }}
    {%- else %}{{- message.content or '' }}{% endif %}
{%- endfor %}
{%- if enable_thinking is defined %}{{- '<think>\\n' if enable_thinking else '<think>\\n\\n</think>\\n\\n@silent' }}{% endif %}"""
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
ANSWERS: dict[str, list[str | int]] = {
    "@aloud": ["<think>", "\n", "Let", " me", " see", ":", CALL, "</", "think>", "\n\n", "Forty", " two", "."],
    "@call": ["<think>x", "</think>", CALL],
    "@silent": [" Just", " this"],
    "@cut": ["<think>\n\n", "On", " and", " on"],
}


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(make_scripted_bundle(tmp_path_factory.mktemp("thinking"), ANSWERS, template=TEMPLATE)) as served:
        yield served


@pytest.fixture(scope="module")
def thinking_http(thinking: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=thinking.url, timeout=60) as client:
        yield client


def chat(http: httpx.Client, content: str, **fields: Any) -> tuple[str | None, str, dict[str, Any]]:
    """Thoughts, content and the whole answer, which are the same in its stream."""
    body = {"model": "source", "messages": [{"role": "user", "content": content}], **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    events = parsed(raw_events(http, "/v1/chat/completions", body))
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or "")
    return message.get("reasoning_content"), message["content"], answer.json()


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def test_thoughts_are_apart_from_the_answer(thinking_http: httpx.Client) -> None:
    """Breaks: a client shows what the model thought as its answer."""
    assert chat(thinking_http, "@aloud")[:2] == (f"Let me see:{CALL}", "Forty two.")
    assert chat(thinking_http, "@silent")[:2] == (None, "Just this")
    assert chat(thinking_http, "@cut")[:2] == ("On and on", "")


def test_calls_are_found_behind_thoughts_only(thinking_http: httpx.Client) -> None:
    """Breaks: a client runs a tool that the model only thought of."""
    thoughts, content, answer = chat(thinking_http, "@aloud", tools=TOOLS)
    assert (thoughts, content) == (f"Let me see:{CALL}", "Forty two.")
    assert "tool_calls" not in answer["choices"][0]["message"]
    thoughts, content, answer = chat(thinking_http, "@call", tools=TOOLS)
    assert (thoughts, content) == ("x", None)
    assert [call["function"]["name"] for call in answer["choices"][0]["message"]["tool_calls"]] == ["f"]


def test_openai_s_client_reads_thoughts(thinking: Served) -> None:
    """Breaks: programs that use the openai package do not find reasoning_content."""
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="source", messages=[{"role": "user", "content": "@aloud"}])
    assert answer.choices[0].message.reasoning_content == f"Let me see:{CALL}"  # type: ignore[attr-defined]


def test_the_template_s_switch_turns_thoughts_off(thinking_http: httpx.Client) -> None:
    """Breaks: a client waits for thoughts that it did not want."""
    for fields in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"reasoning": {"enabled": False}},
    ):
        assert chat(thinking_http, "@aloud", **fields)[:2] == (None, "Just this")


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"reasoning_effort": "high"}, "reasoning_effort", "no variable for it"),
        ({"chat_template_kwargs": {"shout": True}}, "chat_template_kwargs.shout", "enable_thinking"),
        ({"reasoning": {"max_tokens": 0}}, "reasoning.max_tokens", "at least 1"),
        ({"reasoning": {"effort": "none", "enabled": True}}, "reasoning.effort", "contradicts"),
    ],
)
def test_what_the_template_cannot_be_told_is_refused(
    thinking_http: httpx.Client, fields: dict[str, Any], param: str, says: str
) -> None:
    """Breaks: a request for more effort gets the usual effort, and nobody notices."""
    body = {"model": "source", "messages": [{"role": "user", "content": "@silent"}], **fields}
    answer = thinking_http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert says in answer.json()["error"]["message"]


def test_a_model_without_thoughts_refuses_them(http: httpx.Client, model: str) -> None:
    """Breaks: a budget of thoughts is ignored."""
    for fields, param in (
        ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
        ({"reasoning": {"enabled": True}}, "reasoning.enabled"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs.enable_thinking"),
    ):
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], **fields}
        answer = http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_anthropics_messages_have_thinking_blocks(thinking: Served) -> None:
    """Breaks: Anthropic's clients get thoughts as text, or cannot send them back, end them early or turn them off."""
    with anthropic.Anthropic(base_url=thinking.url, api_key="none", max_retries=0) as claude:

        def blocks(*turns: Any, **fields: Any) -> list[tuple[str, Any]]:
            asked: Any = {"model": "source", "max_tokens": 50, "messages": turns, **fields}
            whole = claude.messages.create(**asked)
            with claude.messages.stream(**asked) as stream:
                streamed = stream.get_final_message()
            assert [b.to_dict() | {"id": ""} for b in streamed.content] == [b.to_dict() | {"id": ""} for b in whole.content]
            assert whole.stop_reason == streamed.stop_reason and whole.usage.output_tokens == streamed.usage.output_tokens
            turns_back.append(whole.to_param())
            return [(block.type, getattr(block, "thinking", None) or getattr(block, "text", None)) for block in whole.content]

        turns_back: list[Any] = []
        aloud, silent = {"role": "user", "content": "@aloud"}, {"role": "user", "content": "@silent"}
        assert blocks(aloud) == [("thinking", f"Let me see:{CALL}"), ("text", "Forty two.")]
        assert turns_back[0]["content"][0].signature
        assert blocks(aloud, turns_back[0], silent) == [("text", "Just this")]
        assert blocks(aloud, thinking={"type": "disabled"}) == [("text", "Just this")]
        assert blocks(aloud, thinking={"type": "enabled", "budget_tokens": 2})[0][1] != f"Let me see:{CALL}"
        tool = {"name": "f", "input_schema": {"type": "object"}}
        assert [kind for kind, _ in blocks({"role": "user", "content": "@call"}, tools=[tool])] == ["thinking", "tool_use"]
