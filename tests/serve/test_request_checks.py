"""The checks of a request's fields: by OpenAI's own types, and by a table that has a word for each field."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from tide_serve.errors import ApiError
from tide_serve.request.body import check_fields
from tide_serve.request.fields import CHAT, CHAT_FIELDS, COMPLETION, COMPLETION_FIELDS, EXTENSION_TYPES, THOUGHT_TYPES

HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("params", "table"),
    [(chats.CompletionCreateParamsBase, CHAT_FIELDS), (completions.CompletionCreateParamsBase, COMPLETION_FIELDS)],
    ids=["chat", "completions"],
)
def test_every_field_of_openai_is_in_the_table(params: Any, table: dict[str, Any]) -> None:
    """Breaks: a new release of the openai package has a field that is refused as unknown, without a reason."""
    openais = {*params.__annotations__, "stream"}
    assert openais <= set(table) <= openais | set(EXTENSION_TYPES) | set(THOUGHT_TYPES)


def test_refusals_have_a_reason() -> None:
    """Breaks: a client is told no, and neither why nor what to do."""
    for table in (CHAT_FIELDS, COMPLETION_FIELDS):
        assert all(len(support.reason) > 20 for support in table.values() if support.kind == "refused")


@pytest.mark.parametrize("value", [0, 1, None, "false"])
def test_values_that_equal_an_accepted_one_to_python_are_refused(value: object) -> None:
    """Breaks: store: 0 passes as false although another server would refuse it."""
    with pytest.raises(ApiError, match="store is not supported"):
        check_fields({"store": value}, CHAT_FIELDS)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1},
        {"stop": "x"},
        {"stop": ["x", "y"]},
        {"logit_bias": {"5": 1.5}},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": None, "schema": {"type": "object"}}}},
        {"messages": [*HI, {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "reasoning_content": "y"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": "me"}]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}]},
    ],
)
def test_values_of_the_right_type_pass(fields: dict[str, Any]) -> None:
    """Breaks: a request that OpenAI takes is refused here."""
    CHAT.types.check({"model": "m", "messages": HI, **fields})


@pytest.mark.parametrize("prompt", ["x", ["x", "y"], [1, 2], [[1], [2]], []])
def test_prompts_of_the_right_type_pass(prompt: object) -> None:
    """Breaks: a kind of prompt is refused."""
    COMPLETION.types.check({"model": "m", "prompt": prompt})


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"n": "2"}, "n", "n is '2', expected a valid integer"),
        ({"n": True}, "n", "n is True, expected a valid integer"),
        ({"stop": 5}, "stop", "stop is 5, expected a valid string or a valid list"),
        ({"messages": [{"role": "user", "content": []}, 7]}, "messages[1]", "messages[1] is 7, expected a valid dict"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content is missing; give a value for it"),
        ({"messages": [{**HI[0], "x": 1}]}, "messages[0].x", "messages[0].x is not known here; leave it out"),
        ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x", "not known here"),
    ],
)
def test_errors_name_the_place_and_what_was_expected(fields: dict[str, Any], param: str, message: str) -> None:
    """Breaks: an error is about an alternative of a type that was not meant, or in the words of a library."""
    with pytest.raises(ApiError) as error:
        CHAT.types.check({"model": "m", "messages": HI, **fields})
    assert error.value.param == param and message in error.value.message
