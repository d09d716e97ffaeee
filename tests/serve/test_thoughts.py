"""Thoughts of a model that thinks aloud, on their way to a client: apart from the answer, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from serve.live import Served, serving
from serve.scripted_model import make_scripted_bundle
from serve.sse import parsed, raw_events
from tide_runtime.backends.kv_caches import BLOCK_TOKENS
from tide_runtime.text.thoughts import ThoughtMarks, ThoughtSplitter
from tide_serve.request.answer_parser import AnswerParser
from tide_serve.request.tool_calls import ToolCallParser

# The model's answer depends on the last token only, so a turn has no marks. Thoughts of earlier turns are left out.
TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' and loop.last and message.reasoning_content %}
        {{- '<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {{- message.content or '' }}
{%- endfor %}
{%- if enable_thinking is defined %}{{- '<think>' if enable_thinking else '<think></think>' }}{% endif %}"""
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
ANSWERS: dict[str, list[str | int]] = {
    "@aloud": ["<think>", "Let", " me", " see", ":", CALL, "</think>", "Forty", " two", "."],
    "@call": ["<think", ">x </", "think>", "\n\n", CALL.replace("{}}", '{"a": 1}}')],
    "@silent": [" Just", " this"],
    "@cut": ["<think>\n\n", "On", " and", " on"],
    "@unended": ["<think>.", CALL.replace("{}}", '{"a": 2}}')],
    "@code": ["<think>,", "</think>\t", "return"],
}
THOUGHT = f"Let me see:{CALL}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("thinking")
    with serving(make_scripted_bundle(directory, ANSWERS, [" w"], ["<think>", "</think>"], TEMPLATE)) as served:
        yield served


@pytest.fixture(scope="module")
def thinking_http(thinking: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=thinking.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def thinking_client(thinking: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def chat(http: httpx.Client, content: str, **fields: Any) -> tuple[str | None, str | None, dict[str, Any]]:
    """Thoughts, content and the whole answer, which are the same in its stream."""
    body = {"model": "source", "messages": asked(content), **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    events = parsed(raw_events(http, "/v1/chat/completions", body))
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or "")
    return message.get("reasoning_content"), message["content"], answer.json()


def reasoning_tokens(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return tokens


def test_thoughts_are_apart_from_the_answer(thinking_http: httpx.Client) -> None:
    """Breaks: a client shows what the model thought as its answer."""
    thoughts, content, answer = chat(thinking_http, "@aloud")
    assert (thoughts, content, reasoning_tokens(answer)) == (THOUGHT, "Forty two.", 7)
    assert chat(thinking_http, "@silent")[:2] == (None, " Just this")
    assert chat(thinking_http, "@cut")[:2] == ("On and on", "")


def test_calls_are_found_behind_thoughts_only(thinking_http: httpx.Client) -> None:
    """Breaks: a client runs a tool that the model only thought of."""
    thoughts, content, answer = chat(thinking_http, "@aloud", tools=TOOLS)
    assert (thoughts, content) == (THOUGHT, "Forty two.")
    assert "tool_calls" not in answer["choices"][0]["message"]
    thoughts, content, answer = chat(thinking_http, "@call", tools=TOOLS)
    assert (thoughts, content) == ("x", None)
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}


def test_a_call_in_thoughts_that_never_end_is_none(thinking_http: httpx.Client) -> None:
    """Breaks: a client runs a tool that the model has only thought of, or does not see why its session stops."""
    for limit, reason in ((99, "stop"), (2, "length")):
        thoughts, content, answer = chat(thinking_http, "@unended", tools=TOOLS, max_tokens=limit)
        [choice] = answer["choices"]
        assert (thoughts or "").startswith(".<tool_call>") and not content
        assert "tool_calls" not in choice["message"] and choice["finish_reason"] == reason


def test_white_space_of_an_answer_is_the_model_s(thinking_http: httpx.Client) -> None:
    """Breaks: code that an editor asks for loses its indentation."""
    assert chat(thinking_http, "@code")[:2] == (",", "\treturn")


def test_the_template_s_switch_turns_thoughts_on_and_off(thinking_http: httpx.Client) -> None:
    """Breaks: a client waits for thoughts that it did not want, or gets those that the prompt began as the answer."""
    for off in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"reasoning": {"enabled": False}},
    ):
        thoughts, content, answer = chat(thinking_http, "@silent", **off)
        assert (thoughts, content, reasoning_tokens(answer)) == (None, "Forty two.", 0)
    for on in ({"chat_template_kwargs": {"enable_thinking": True}}, {"reasoning": {"enabled": True}}):
        thoughts, content, answer = chat(thinking_http, "@silent", **on)
        assert (thoughts, content, reasoning_tokens(answer)) == (THOUGHT, "Forty two.", 6)


def test_a_budget_ends_thoughts_and_the_answer_follows(thinking_http: httpx.Client) -> None:
    """Breaks: a client that limits thoughts pays for all of them, or gets no answer."""
    thoughts, content, answer = chat(thinking_http, "@silent", reasoning={"max_tokens": 2})
    assert (thoughts, content, reasoning_tokens(answer)) == ("Let me", "Forty two.", 3)
    assert chat(thinking_http, "@silent", reasoning={"max_tokens": 100})[:2] == (THOUGHT, "Forty two.")


def test_formats_apply_behind_the_thoughts(thinking_http: httpx.Client) -> None:
    """Breaks: a model that must answer in a format cannot think, or thinks into the format."""
    form = {"type": "regex", "pattern": "Let|Forty"}
    thoughts, content, answer = chat(thinking_http, "@aloud", response_format=form)
    assert (thoughts, content, answer["choices"][0]["finish_reason"]) == (THOUGHT, "Forty", "stop")
    off = {"enable_thinking": False}
    assert chat(thinking_http, "@aloud", response_format=form, chat_template_kwargs=off)[:2] == (None, "Forty")
    budget = {"max_tokens": 1}
    assert chat(thinking_http, "@silent", response_format=form, reasoning=budget)[:2] == ("Let", "Forty")


def test_stop_strings_end_the_answer_only(thinking_http: httpx.Client) -> None:
    """Breaks: an answer is empty because its thoughts have what ends it."""
    assert chat(thinking_http, "@aloud", stop=["see", " two"])[:2] == (THOUGHT, "Forty")


def test_tags_in_an_answer_are_hidden_wherever_its_stream_is_cut() -> None:
    """Breaks: a client sees a piece of a tag, which a stop string such as ">>>" has had held back until the next token."""
    text, tags = "Well<think>a > b</think></tool_call>.", ["<think>", "</think>"]
    for at in range(len(text)):
        splitter, tools = ThoughtSplitter(ThoughtMarks(*tags), begun=False), ToolCallParser({"f"}, ["</tool_call>"])
        parser = AnswerParser(splitter, tools, tags)
        parts = parser.feed(text[:at]), parser.feed(text[at:], last=True)
        assert "".join(part.text for part in parts) == "Wella > b.", at


def test_logprobs_are_those_of_all_tokens(thinking_http: httpx.Client) -> None:
    """Breaks: a token of the thoughts, or of the answer, has no log-probability."""
    _, _, answer = chat(thinking_http, "@aloud", logprobs=True)
    assert len(answer["choices"][0]["logprobs"]["content"]) == answer["usage"]["completion_tokens"] == 11


def test_thoughts_that_the_template_drops_keep_the_prefix_before_them(thinking_http: httpx.Client) -> None:
    """Breaks: each turn of a chat computes its whole history again."""
    question = " w" * 2 * BLOCK_TOKENS + "@aloud"
    thoughts, content, _ = chat(thinking_http, question, cache_salt="turns")
    turns = [*asked(question), {"role": "assistant", "content": content, "reasoning_content": thoughts}, *asked(" w@silent")]
    answer = chat(thinking_http, "", messages=turns, cache_salt="turns")[2]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * BLOCK_TOKENS


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"reasoning": {"max_tokens": 0}}, "reasoning.max_tokens", "at least 1"),
        ({"reasoning": {"effort": "none", "enabled": True}}, "reasoning.effort", "contradicts"),
    ],
)
def test_what_cannot_be_is_refused(thinking_http: httpx.Client, fields: dict[str, Any], param: str, says: str) -> None:
    """Breaks: one of two contradicting fields is dropped silently."""
    answer = thinking_http.post("/v1/chat/completions", json={"model": "source", "messages": asked("@silent"), **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert says in answer.json()["error"]["message"]


def test_a_model_without_thoughts_does_not_think(http: httpx.Client, model: str) -> None:
    """Breaks: agents that ask every model for thoughts get 400."""
    body = {"model": model, "messages": asked("Hi"), "max_tokens": 4}
    wanted = http.post("/v1/chat/completions", json=body).json()["choices"]
    for fields in (
        {"reasoning": {"max_tokens": 5}},
        {"reasoning": {"enabled": True, "effort": "high"}},
        {"reasoning_effort": "xhigh"},
        {"chat_template_kwargs": {"enable_thinking": True, "shout": True}},
    ):
        assert http.post("/v1/chat/completions", json={**body, **fields}).json()["choices"] == wanted


# --- with the official client


def test_the_openai_client_reads_thoughts(thinking_client: openai.OpenAI) -> None:
    """Breaks: programs that use the openai package do not find reasoning_content."""
    answer = thinking_client.chat.completions.create(model="source", messages=asked("@aloud"))  # type: ignore[arg-type]
    assert answer.choices[0].message.reasoning_content == THOUGHT  # type: ignore[attr-defined]


def test_litellm_reads_thoughts(thinking: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: proxies and agents that go through LiteLLM lose the thoughts, whole or streamed."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise its import looks for one on the internet
    litellm = pytest.importorskip("litellm", reason="LiteLLM is not installed; pip install 'tide-llm[dev]'")
    asks: dict[str, Any] = {
        "model": "openai/source",
        "messages": asked("@aloud"),
        "api_base": f"{thinking.url}/v1",
        "api_key": "none",
    }
    message = litellm.completion(**asks).choices[0].message
    assert (message.reasoning_content, message.content) == (THOUGHT, "Forty two.")
    deltas = [chunk.choices[0].delta for chunk in litellm.completion(**asks, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHT


def test_responses_have_thoughts_as_items(thinking_client: openai.OpenAI) -> None:
    """Breaks: a response has no reasoning item, or its stream has other items than itself."""
    response = thinking_client.responses.create(model="source", input="@aloud")
    thoughts, message = response.output
    assert thoughts.type == "reasoning" and thoughts.content is not None and thoughts.content[0].text == THOUGHT
    assert message.type == "message" and response.output_text == "Forty two."
    assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens == 7
    events = [*thinking_client.responses.create(model="source", input="@aloud", stream=True)]
    kinds = [event.type for event in events if not event.type.endswith(".delta")]
    assert kinds == [
        "response.created", "response.in_progress",
        "response.output_item.added", "response.content_part.added",
        "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
        "response.output_item.added", "response.content_part.added",
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.completed",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == THOUGHT
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == "Forty two."
    assert [item.type for item in last.response.output] == ["reasoning", "message"]


def test_thoughts_of_a_response_come_back_to_the_model(thinking_client: openai.OpenAI, thinking: Served) -> None:
    """Breaks: a client that sends a response's items back is refused, or the model does not see what it thought."""
    response = thinking_client.responses.create(model="source", input="@aloud")
    again = thinking_client.responses.create(
        model="source",
        input=[{"role": "user", "content": "@silent"}, *(item.to_dict() for item in response.output)],  # type: ignore[list-item]
    )
    turns = [*asked("@silent"), {"role": "assistant", "content": "Forty two.", "reasoning_content": THOUGHT}]
    assert again.usage is not None and again.usage.input_tokens == len(thinking.engine.chat_prompt(turns))
    cut = thinking_client.responses.create(model="source", input=[*asked("@silent"), response.output[0].to_dict()])  # type: ignore[list-item]
    assert cut.status == "completed"


def test_what_a_response_cannot_have_is_refused(thinking_client: openai.OpenAI) -> None:
    """Breaks: log-probabilities of another text."""
    for fields, param in (({"include": ["message.output_text.logprobs"]}, "include"),):
        with pytest.raises(openai.BadRequestError) as refused:
            thinking_client.responses.create(model="source", input="@aloud", **fields)  # type: ignore[call-overload]
        assert refused.value.param == param


def test_anthropics_messages_have_thinking_blocks(thinking: Served) -> None:
    """Breaks: Anthropic's clients get thoughts as text, or cannot send them back, end them early or turn them off."""
    with anthropic.Anthropic(base_url=thinking.url, api_key="none", max_retries=0) as claude:

        def blocks(*turns: Any, **fields: Any) -> list[tuple[str, Any]]:
            asked: Any = {"model": "source", "max_tokens": 50, "messages": turns, **fields}
            whole = claude.messages.create(**asked)
            with claude.messages.stream(**asked) as stream:
                streamed = stream.get_final_message()
            parts = ("type", "thinking", "signature", "text", "input")
            same = [[getattr(block, part, None) for part in parts] for block in whole.content]
            assert [[getattr(block, part, None) for part in parts] for block in streamed.content] == same
            assert whole.stop_reason == streamed.stop_reason and whole.usage.output_tokens == streamed.usage.output_tokens
            turns_back.append(whole.to_param())
            return [(block.type, getattr(block, "thinking", None) or getattr(block, "text", None)) for block in whole.content]

        turns_back: list[Any] = []
        aloud, silent = {"role": "user", "content": "@aloud"}, {"role": "user", "content": "@silent"}
        assert blocks(aloud) == [("thinking", THOUGHT), ("text", "Forty two.")]
        assert turns_back[0]["content"][0].signature
        assert blocks(aloud, turns_back[0], silent) == [("text", " Just this")]
        assert blocks(aloud, thinking={"type": "disabled"}) == [("text", "Forty two.")]
        assert blocks(aloud, thinking={"type": "enabled", "budget_tokens": 2})[0][1] != THOUGHT
        tool = {"name": "f", "input_schema": {"type": "object"}}
        assert [kind for kind, _ in blocks({"role": "user", "content": "@call"}, tools=[tool])] == ["thinking", "tool_use"]
