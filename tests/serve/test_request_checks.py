"""The checks of a request's fields: what is honoured, refused by its name, or accepted without effect and named in the log."""

from types import ModuleType
from typing import Any

import pytest
from tide_serve.errors import ApiError
from tide_serve.observe.request_record import RequestRecord, current_record
from tide_serve.request import fields, messages_as_chat, responses_as_chat
from tide_serve.request.body import BodyForm, check_fields
from tide_serve.request.fields import CHAT, COMPLETION
from tide_serve.request.messages_as_chat import MESSAGE
from tide_serve.request.other_servers import in_openais_terms
from tide_serve.request.responses_as_chat import RESPONSE
from tide_serve.request.tool_results import text_parts

HI = [{"role": "user", "content": "Hi"}]
CALL: dict[str, Any] = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def checked(form: BodyForm, strict: bool = False, **body: Any) -> tuple[dict[str, Any], list[str]]:
    """The body, and what the log would call without effect."""
    needed: dict[int, dict[str, Any]] = {
        id(CHAT): {"messages": HI},
        id(MESSAGE): {"messages": HI, "max_tokens": 1},
        id(RESPONSE): {"input": "Hi"},
    }
    body = {**needed.get(id(form), {}), **body}
    record = RequestRecord("id", "POST", "/")
    token = current_record.set(record)
    try:
        check_fields(body, form.fields)
        return form.types.check(body, strict), record.no_effect
    finally:
        current_record.reset(token)


@pytest.mark.parametrize("module", [fields, messages_as_chat, responses_as_chat])
def test_refusals_have_a_reason(module: ModuleType) -> None:
    """Breaks: a client is told no, and neither why nor what to do."""
    forms = [value for value in vars(module).values() if isinstance(value, BodyForm)]
    assert forms and all(len(refused.reason) > 20 for form in forms for refused in form.fields.values())


@pytest.mark.parametrize(("name", "value"), [("use_beam_search", 0), ("mirostat", False)])
def test_values_that_equal_an_accepted_one_to_python_are_refused(name: str, value: object) -> None:
    """Breaks: use_beam_search: 0 passes as false although another server would refuse it."""
    with pytest.raises(ApiError, match=f"{name} is not supported"):
        check_fields({name: value}, CHAT.fields)


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 1},
        {"stop": "x"},
        {"stop": ["x", "y"]},
        {"logit_bias": {"5": 1.5}},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": None}}}},
        {"messages": [*HI, {"role": "assistant", "content": "x", "reasoning_content": "y", "tool_calls": [CALL]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": "me"}]},
        {"tools": [{"type": "function", "function": {"parameters": {"b": 1, "a": 2}, "name": "f", "strict": True}}]},
    ],
)
def test_values_of_the_right_type_pass_as_they_are(body: dict[str, Any]) -> None:
    """Breaks: a request that OpenAI takes is refused, or its keys come to the model in another order."""
    clean, idle = checked(CHAT, **body)
    assert repr(clean) == repr({"messages": HI, **body}) and not idle


@pytest.mark.parametrize("prompt", ["x", ["x", "y"], [1, 2], [[1], [2]], []])
def test_prompts_of_the_right_type_pass(prompt: object) -> None:
    """Breaks: a kind of prompt is refused."""
    assert checked(COMPLETION, prompt=prompt)[0] == {"prompt": prompt}


FORMS = {"json_schema": {"name": "n", "description": None, "schema": {}}, "type": "json_schema"}


@pytest.mark.parametrize(
    ("form", "body"),
    [
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "description": None, "parameters": None}}]}),
        (CHAT, {"response_format": FORMS, "stream_options": {"include_usage": None}, "user": None}),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {**CALL["function"], "x": None}}]}]}),
        (MESSAGE, {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": None}]}]}),
        (RESPONSE, {"input": [{"type": "reasoning", "content": None, "summary": None}]}),
    ],
)
def test_a_null_is_an_absent_key_everywhere(form: BodyForm, body: dict[str, Any]) -> None:
    """Breaks: clients that write their types with nulls get 400, or a line of the log that names what they did not set."""
    clean, idle = checked(form, **body)
    assert "None" not in repr(clean) and not idle


@pytest.mark.parametrize(
    ("form", "body", "path"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "a": 1}]}]}, "messages[].content[].a"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}, "a": 1}]}, "tools[].a"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "a": 1}]}]}, "messages[].tool_calls[].a"),
        (CHAT, {"response_format": {**FORMS, "text": 1}}, "response_format.text"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f", "a": 1}}}, "tool_choice.function.a"),
        (MESSAGE, {"system": [{"type": "text", "text": "S", "a": {"text": 1}}]}, "system[].a"),
        (MESSAGE, {"tools": [{"name": "f", "input_schema": {}, "a": True}]}, "tools[].a"),
        (MESSAGE, {"thinking": {"type": "adaptive", "a": "omitted"}}, "thinking.a"),
        (
            RESPONSE,
            {"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "r", "a": 1}]}]},
            "input[].content[].a",
        ),
        (RESPONSE, {"text": {"format": {"type": "text", "a": 1}}}, "text.format.a"),
    ],
)
def test_a_field_without_effect_is_named(form: BodyForm, body: dict[str, Any], path: str) -> None:
    """Breaks: a key of a union is refused, left out silently, or called by its union's tag; --strict-fields lets it pass."""
    clean, idle = checked(form, **body)
    assert idle == [path] and "'a'" not in repr(clean)
    with pytest.raises(ApiError) as error:
        checked(form, strict=True, **body)
    assert error.value.param == path.replace("[]", "[0]") and error.value.code == "unknown_parameter"


@pytest.mark.parametrize(
    ("form", "body"),
    [
        (CHAT, {"store": True, "verbosity": "low", "messages": [{**HI[0], "cache_control": {}}], "num_ctx": 5}),
        (MESSAGE, {"context_management": {}, "betas": [], "messages": [{"role": "user", "content": [
            {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "scope": "global"}}]}]}),
        (RESPONSE, {"store": True, "truncation": "auto", "input": [{**HI[0], "phase": "commentary"}]}),
    ],
)  # fmt: skip
def test_strict_fields_lets_known_fields_pass(form: BodyForm, body: dict[str, Any]) -> None:
    """Breaks: --strict-fields cannot be used with the agents that people run."""
    assert len(checked(form, strict=True, **body)[1]) >= 3


@pytest.mark.parametrize(
    ("form", "body", "param", "message"),
    [
        (CHAT, {"n": "2"}, "n", "n is '2', expected a valid integer"),
        (CHAT, {"n": True}, "n", "n is True, expected a valid integer"),
        (CHAT, {"stop": 5}, "stop", "stop is 5, expected a string or a list of strings"),
        (CHAT, {"messages": [{"role": "user", "content": []}, 7]}, "messages[1]", "messages[1] is 7, expected an object"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "messages[0].content is missing; give a value for it"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role is missing"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text", "is 5"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "messages[0].content[0].type", "'x', expected"),
        (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function", "is missing"),
        (CHAT, {"response_format": {"type": "text", "x": 1}, "stop": {"str": 1}}, "stop", "stop is an object"),
        (COMPLETION, {"prompt": [1, "x"]}, "prompt[1]", "prompt[1] is 'x', expected a valid integer"),
        (COMPLETION, {"prompt": [[1], [None]]}, "prompt[1][0]", "expected a valid integer"),
        (MESSAGE, {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].id", ""),
        (RESPONSE, {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id", "is missing"),
        (RESPONSE, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "'item_reference', expected 'message'"),
        (RESPONSE, {"n": 2}, "n", "not of this route"),
        (MESSAGE, {"stop": "x"}, "stop", "not of this route"),
    ],
)  # fmt: skip
def test_errors_name_the_place_and_what_was_expected(form: BodyForm, body: dict[str, Any], param: str, message: str) -> None:
    """Breaks: an error is about an alternative of a type that was not meant, or in the words of a library."""
    with pytest.raises(ApiError) as error:
        checked(form, **body)
    assert error.value.param == param and message in error.value.message


def test_the_log_does_not_quote_a_text() -> None:
    """Breaks: a prompt of the wrong type is in the log."""
    with pytest.raises(ApiError) as error:
        checked(CHAT, messages="secret")
    assert "secret" in error.value.message and error.value.logged == "messages is a string, expected a valid list"


SCHEMA = {"type": "object"}
JSON_ANSWER = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}}


@pytest.mark.parametrize(
    ("body", "terms", "names"),
    [
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}, {"repetition_penalty": "repeat_penalty"}),
        ({"guided_regex": "a+"}, {"response_format": {"type": "regex", "pattern": "a+"}}, {"response_format": "guided_regex"}),
        ({"guided_choice": ["a.", "b"]}, {"response_format": {"type": "regex", "pattern": r"a\.|b"}}, {}),
        ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}, {}),
        ({"think": False}, {"reasoning": {"enabled": False}}, {}),
        ({"thinking": {"type": "disabled"}}, {"reasoning": {"enabled": False}}, {}),
        ({"think": "low"}, {"reasoning_effort": "low"}, {}),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}, {}),
        ({"guided_json": SCHEMA}, JSON_ANSWER, {}),
        ({"guided_json": '{"type": "object"}'}, JSON_ANSWER, {}),
        ({"json_schema": SCHEMA}, JSON_ANSWER, {}),
        ({"structured_outputs": {"json": SCHEMA}}, JSON_ANSWER, {}),
    ],
)  # fmt: skip
def test_fields_of_other_servers_mean_the_same(body: dict[str, Any], terms: dict[str, Any], names: dict[str, str]) -> None:
    """Breaks: an agent that is set up for vLLM, llama.cpp or Ollama gets another text, or errors about fields it did not send."""
    found, name_of = in_openais_terms(body)
    assert found == terms and {field: name_of(field) for field in names} == names


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"grammar": "root ::= ("}, "grammar"),
        ({"guided_json": "{"}, "guided_json"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(body: dict[str, Any], param: str) -> None:
    """Breaks: one of two constraints is dropped silently."""
    with pytest.raises(ApiError) as error:
        in_openais_terms(body)
    assert error.value.param == param


def test_what_a_call_returned_is_text() -> None:
    """Breaks: a screenshot in a tool's result ends the session."""
    parts = text_parts([
        {"type": "text", "text": "a"}, {"type": "image", "source": {"type": "base64", "data": "eA=="}}, {"type": "input_image"},
        {"type": "image_url"}, {"type": "document", "source": {"type": "text", "data": "b"}}, {"type": "input_file"},
    ])  # fmt: skip
    image = "[image left out: this model reads text only]"
    assert [part["text"] for part in parts] == ["a", image, image, image, "b", image.replace("image", "file")]  # type: ignore[index]
