"""Messages of OpenAI's API must reach each family's template in the form that it was written for."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tide_runtime.errors import PromptError
from tide_runtime.text.chat_template import analysed, render_chat
from transformers import PreTrainedTokenizerFast

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS = {"city": "Röm", "days": 2, "at": {"x": [1, None]}}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "", "parameters": {"type": "object"}}}
# Written for these tests in the manner of common families, with what makes each of them special.
FAMILIES = {path.stem: path.read_text(encoding="utf-8") for path in Path(__file__).with_name("chat_templates").iterdir()}
OBJECTS = ("hermes", "llama_3", "mistral_3", "qwen_coder", "gpt_oss")
TEXTS = ("deepseek_r1", "deepseek_v31")


def chat(content: Any = None, arguments: Any = None, call_id: str = "abc123DEF") -> list[dict[str, Any]]:
    """A chat as OpenAI's clients send it."""
    text = json.dumps(ARGUMENTS, ensure_ascii=False) if arguments is None else arguments
    call = {"id": call_id, "type": "function", "function": {"name": "get_weather", "arguments": text}}
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "name": "get_weather", "content": "sunny"},
        {"role": "user", "content": "And now?"},
    ]


def transformers_text(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """The text that transformers renders from messages in the form of the template."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), **SPECIAL)
    options = {"add_generation_prompt": True, **options}
    return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options))


def ours(name: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return render_chat(FAMILIES[name], messages, special_tokens=SPECIAL, **options)


@pytest.mark.parametrize("tools", [[TOOL], None], ids=["tools", "no tools"])
@pytest.mark.parametrize("content", [None, "", "Let me see."], ids=["none", "empty", "text"])
@pytest.mark.parametrize("name", [*OBJECTS, "deepseek_v31"])
def test_calls_are_as_transformers_writes_them(name: str, content: str | None, tools: Any) -> None:
    """Breaks: a model reads its earlier calls in a form that it was not trained on, or the request fails."""
    sent, wanted = chat(content), chat(content)
    if name in OBJECTS:
        wanted[1]["tool_calls"][0]["function"]["arguments"] = ARGUMENTS
    if name == "deepseek_v31" and not content:  # this release of transformers leaves a none out, which this template cannot take
        wanted[1]["content"] = ""
    if name == "gpt_oss" and content:
        with pytest.raises(PromptError, match="content and calls"):
            ours(name, sent, tools=tools)
        return
    assert ours(name, sent, tools=tools) == transformers_text(FAMILIES[name], wanted, tools=tools)


@pytest.mark.parametrize("content", [None, ""])
def test_a_call_that_is_written_where_content_is_none(content: str | None) -> None:
    """Breaks: DeepSeek R1's template leaves the call out, so the model reads a result of nothing."""
    prompt = ours("deepseek_r1", chat(content))
    text = json.dumps(ARGUMENTS, ensure_ascii=False)
    assert f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{text}\n```<｜tool▁call▁end｜>" in prompt
    assert "None" not in prompt and "<｜tool▁output▁begin｜>sunny<｜tool▁output▁end｜>" in prompt


@pytest.mark.parametrize("name", [*OBJECTS, *TEXTS])
def test_objects_and_text_are_the_same_call(name: str) -> None:
    """Breaks: a caller in Python, who has arguments as an object, gets another prompt than one over HTTP."""
    assert ours(name, chat(arguments=ARGUMENTS)) == ours(name, chat())


def test_arguments_that_are_not_json_stay_as_the_model_wrote_them() -> None:
    """Breaks: a call that a model has got wrong makes the rest of the chat impossible."""
    assert 'get_weather\n```json\n{"city": \n```' in ours("deepseek_r1", chat(arguments='{"city": '))
    assert '"arguments": "{\\"city\\": "' in ours("hermes", chat(arguments='{"city": '))
    assert '"arguments": {}' in ours("hermes", chat(arguments=""))


@pytest.mark.parametrize("call_id", ["call_0123456789abcdef01234567", "c1"])
def test_ids_of_calls_fit_the_template(call_id: str) -> None:
    """Breaks: Mistral's templates refuse the ids that this and other servers give to calls."""
    prompt = ours("mistral_3", chat(call_id=call_id))
    given = prompt.split('"id": "')[1][:10]
    assert given[:9].isalnum() and given[9] == '"' and f'"call_id": "{given[:9]}"' in prompt
    assert '"id": "abc123DEF"' in ours("mistral_3", chat())
    assert ours("hermes", chat(call_id=call_id)) == ours("hermes", chat())


PARTS = [{"type": "text", "text": "a "}, {"type": "text", "text": " b"}]


@pytest.mark.parametrize(
    ("name", "text"), [("gemma_3", "user\nab<end"), ("smolvlm", "User: a   b<end>"), ("hermes", "user\na  b<|im_end")]
)
def test_content_parts(name: str, text: str) -> None:
    """Breaks: a list of parts fails, is written as Python spells it, or loses a part."""
    messages = [{"role": "user", "content": PARTS}]
    assert text in ours(name, messages)
    if name != "hermes":
        assert ours(name, messages) == transformers_text(FAMILIES[name], messages)


def test_text_for_a_template_that_takes_parts_only() -> None:
    """Breaks: the template of a vision model goes through the characters of a text, and the prompt has none of it."""
    assert ours("smolvlm", [{"role": "user", "content": "hi"}]) == "User: hi<end>\nAssistant:"


def test_developers() -> None:
    """Breaks: instructions of a developer come in a role that the model does not have, or not in the one it has."""
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert "<|im_start|>system\nBe brief." in ours("hermes", messages)
    assert ours("gpt_oss", messages).startswith("<|start|>developer<|message|>Be brief.")
    only_developers = (
        "{% for m in messages %}{% if m.role == 'developer' %}D:{{ m.content }}{% else %}{{ m.role }}{% endif %}{% endfor %}"
    )
    assert render_chat(only_developers, messages, special_tokens={}) == "D:Be brief.user"


@pytest.mark.parametrize(
    ("template", "takes"),
    [
        ("{{ tools }}", True),
        ("{% if tools is defined and tools %}{% for tool in tools %}{{ tool }}{% endfor %}{% endif %}", True),
        (FAMILIES["llama_3"], True),
        ("You may use tools. {# tools #}{{ messages[0].tools }}", False),
        ("{% set tools = 1 %}{{ tools }}", False),
    ],
)
def test_whether_a_template_takes_tools(template: str, takes: bool) -> None:
    """Breaks: a template that only has the word is left to show tools, and the model never hears of them."""
    assert analysed(template).forms.takes_tools == takes


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        ("{{ messages[1].content }}|{{ messages[1].tool_calls[0].function.name }}", "|get_weather"),
        ("{{ messages[1]['content'] | trim + messages[1].tool_calls[0].function.name }}", "get_weather"),
        ("{{ messages[1]['content'] + messages[1].tool_calls[0].function.name }}", "get_weather"),
        ("{{ 'None' }} {{ messages[1].content is none }} {{ messages[1].tool_calls[0].function.name }}", "None True get_weather"),
    ],
)
def test_no_content_is_never_a_word(template: str, shown: str) -> None:
    """Breaks: the model reads "None" where an assistant's message had only calls, or the chat fails."""
    assert render_chat(template, chat(), special_tokens={}) == shown


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[1].tool_calls[0].function.arguments }}",
        "{{ 'A' ~ messages[1].tool_calls[0].function.arguments }}",
        "{{ messages[1].tool_calls }}",
    ],
)
def test_arguments_are_never_in_python_spelling(template: str) -> None:
    """Breaks: the model reads {'city': 'Rome'}, which is no JSON, and learns to write it."""
    assert json.dumps(ARGUMENTS, ensure_ascii=False) in render_chat(template, chat(), special_tokens={})


def test_messages_of_the_caller_stay_as_they_are() -> None:
    """Breaks: a caller that keeps its history finds it rewritten."""
    sent = chat()
    kept = copy.deepcopy(sent)
    ours("mistral_3", sent)
    assert sent == kept


def test_phi_shows_tools_and_no_calls() -> None:
    """Breaks: a template that leaves calls out fails on the content of a message that has nothing else."""
    assert "<|assistant|><|end|>" in ours("phi_4", chat(), tools=[TOOL])


@pytest.mark.parametrize(
    ("message", "explanation"),
    [
        ({"role": "assistant", "content": None}, '"content" of message 0 is None'),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "expected a string, or parts"),
        ({"role": "assistant", "tool_calls": "f(1)"}, '"tool_calls" of message 0 is'),
        ({"role": "assistant", "tool_calls": [1]}, "expected a list of objects"),
    ],
)
def test_bad_messages_are_explained(message: dict[str, Any], explanation: str) -> None:
    """Breaks: a malformed message ends in a traceback of the template."""
    with pytest.raises(PromptError, match=explanation):
        ours("hermes", [message])
