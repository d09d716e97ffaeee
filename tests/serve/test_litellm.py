"""LiteLLM, which many applications call models through, as a client of the server."""

import json
from typing import Any

import pytest
from serve.live import Served

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def litellm() -> Any:
    """The module, whose import takes seconds."""
    return pytest.importorskip("litellm", reason="LiteLLM is not installed; pip install 'tide-llm[dev]'")


@pytest.fixture
def ask(litellm: Any, served: Served, model: str) -> Any:
    """`litellm.completion` against the shared server."""

    def ask(**fields: Any) -> Any:
        where = {"model": f"openai/{model}", "api_base": f"{served.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}
        return litellm.completion(**where, **{"messages": HI, "max_tokens": 8, **fields})

    return ask


def test_every_field_that_it_sends(ask: Any) -> None:
    """Breaks: a field that LiteLLM passes on is refused."""
    made = ask(
        temperature=0.7, top_p=0.9, n=2, stop=["zzz"], presence_penalty=0.1, frequency_penalty=0.1, logit_bias={"70": 1},
        user="me", seed=1, logprobs=True, top_logprobs=2, response_format={"type": "text"}, top_k=40, min_p=0.01,
        extra_body={"repetition_penalty": 1.1},
    )  # fmt: skip
    assert len(made.choices) == 2 and made.usage.completion_tokens > 0
    assert len(made.choices[0].logprobs.content[0].top_logprobs) == 2


def test_a_stream_is_the_answer(ask: Any) -> None:
    """Breaks: LiteLLM drops or doubles text of a stream, or its usage."""
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = ask()
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(litellm: Any, ask: Any, stream: bool) -> None:
    """Breaks: agents on LiteLLM do not see the calls."""
    parameters = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    answer = ask(tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=100, stream=stream)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer))
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "f" and json.loads(call.function.arguments) in ({"x": 1}, {"x": 2})
    assert answer.choices[0].finish_reason == "tool_calls"
    # The answer and the call's result go back, as an agent sends them.
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    assert ask(messages=[*HI, answer.choices[0].message, result]).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_route(litellm: Any, served: Served, model: str, ask: Any, stream: bool) -> None:
    """Breaks: LiteLLM's models of Anthropic, called at this server: texts, calls, and results that go back."""

    def claude(**fields: Any) -> Any:
        where = {"model": f"anthropic/{model}", "api_base": served.url, "api_key": "none", "max_retries": 0, "timeout": 60}
        answer = litellm.completion(**where, stream=stream, **{"messages": HI, "max_tokens": 8, **fields})
        return litellm.stream_chunk_builder(list(answer)) if stream else answer

    made, same = claude(temperature=0.0, top_p=0.9, stop=["zzz"], user="me"), ask()
    assert made.choices[0].message.content == same.choices[0].message.content and made.choices[0].finish_reason == "length"
    assert made.usage.total_tokens == same.usage.total_tokens
    parameters = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    answer = claude(tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=100)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "f" and json.loads(call.function.arguments) in ({"x": 1}, {"x": 2})
    assert answer.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    assert claude(messages=[*HI, answer.choices[0].message, result], tools=tools).choices[0].message
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        claude(temperature=5)


def test_text_completions(litellm: Any, served: Served, model: str) -> None:
    """Breaks: LiteLLM's text_completion, which programs with prompts use."""
    made = litellm.text_completion(
        model=f"text-completion-openai/{model}", prompt="def add", max_tokens=4, api_base=f"{served.url}/v1", api_key="none"
    )
    assert made.choices[0].text


def test_errors_are_its_own(litellm: Any, ask: Any) -> None:
    """Breaks: LiteLLM tries a bad request again, or reports it as a failure of the server."""
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask(temperature=5)
