"""Tools of chats: calls, choices, results."""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from runtime.text.test_template_turns import TEMPLATES, chat
from serve.live import Served, serving
from tide_runtime.text.chat_template import analysed, render_chat
from tide_serve.request.prompt_ids import template_messages, with_calls_as_text, with_tools_described

ASK = [{"role": "user", "content": "Hi"}]


def tool(name: str, strict: bool = False, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object", "properties": properties, "required": [*properties], "additionalProperties": False,
    }  # fmt: skip
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


WEATHER, TIME = tool("get_weather", city={"enum": ["Rome", "Oslo"]}), tool("get_time", zone={"enum": [1, 2]})


def ask(client: openai.OpenAI, model: str, **fields: Any) -> Any:
    fields = {"messages": ASK, "max_tokens": 300, "seed": 3, **fields}
    return client.chat.completions.create(model=model, **fields).choices[0]


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("parallel", [False, True])
def test_required_calls_always_parse(client: openai.OpenAI, model: str, temperature: float, parallel: bool) -> None:
    """Breaks: a model that knows nothing of tools writes text although a call is required, or arguments out of the schema."""
    choice = ask(
        client, model, tools=[WEATHER, TIME], tool_choice="required", temperature=temperature, parallel_tool_calls=parallel
    )
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert len(choice.message.tool_calls) >= 1 if parallel else len(choice.message.tool_calls) == 1
    for call in choice.message.tool_calls:
        allowed = {"get_weather": [{"city": "Rome"}, {"city": "Oslo"}], "get_time": [{"zone": 1}, {"zone": 2}]}
        assert call.type == "function" and json.loads(call.function.arguments) in allowed[call.function.name]


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_arguments_may_spell_added_tokens(client: openai.OpenAI, model: str, temperature: float) -> None:
    """Breaks: with a vocabulary like Qwen's, a schema that has the text of an added token ends in an error."""
    tag = tool("close_tag", tag={"enum": ["<tool_call>", "<|im_end|>"]})
    [call] = ask(
        client, model, tools=[tag], tool_choice="required", temperature=temperature, parallel_tool_calls=False
    ).message.tool_calls
    assert json.loads(call.function.arguments)["tag"] in ("<tool_call>", "<|im_end|>")


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "get_time"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TIME]}},
    ],
    ids=["named", "allowed"],
)
def test_the_named_tool_is_called(client: openai.OpenAI, model: str, choice: dict[str, Any]) -> None:
    """Breaks: another tool than the one the client insists on is called."""
    calls = ask(client, model, tools=[WEATHER, TIME], tool_choice=choice).message.tool_calls
    assert {call.function.name for call in calls} == {"get_time"}
    assert choice["type"] == "allowed_tools" or len(calls) == 1


def token_bias(served: Served, text: str) -> dict[str, int]:
    """A bias that has the random model write ``text``, which is one token, wherever a grammar allows it."""
    [token] = served.engine.tokenizer.encode(text)  # type: ignore[union-attr]
    return {str(token): 100}


def test_auto_leaves_text_alone(client: openai.OpenAI, served: Served, model: str) -> None:
    """Breaks: a model that calls nothing has its text changed, or its answer ends as a call."""
    choice = ask(client, model, tools=[WEATHER], max_tokens=8)
    [generation] = served.engine.generate(served.engine.chat_prompt(ASK, tools=[WEATHER]))
    assert generation.text is not None and generation.text.startswith(choice.message.content.rstrip())
    assert choice.message.tool_calls is None and choice.finish_reason == "length"


@pytest.mark.parametrize("parallel", [False, True])
def test_strict_tools_follow_their_schema_in_free_text(client: openai.OpenAI, served: Served, model: str, parallel: bool) -> None:
    """Breaks: with strict, a call that the model begins by itself has other arguments than the schema allows."""
    strict = tool("get_time", strict=True, zone={"enum": [1, 2]})
    bias = token_bias(served, "<tool_call>")
    choice = ask(client, model, tools=[strict], parallel_tool_calls=parallel, logit_bias=bias, temperature=1.5, max_tokens=60)
    calls = choice.message.tool_calls
    assert all(json.loads(call.function.arguments) in ({"zone": 1}, {"zone": 2}) for call in calls)
    assert len(calls) > 1 if parallel else (len(calls), choice.finish_reason) == (1, "tool_calls")


@pytest.mark.parametrize("text", ["<tool_call>", "{"])
def test_a_schema_beside_tools(client: openai.OpenAI, served: Served, model: str, text: str) -> None:
    """Breaks: with tools, the answer's schema is forgotten; or a call that the model chooses comes as text."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    choice = ask(
        client, model, tools=[TIME], response_format=form, logit_bias=token_bias(served, text), parallel_tool_calls=False
    )
    if text == "{":
        assert json.loads(choice.message.content) in ({"a": 1}, {"a": 2}) and choice.finish_reason == "stop"
    else:
        [call] = choice.message.tool_calls
        assert json.loads(call.function.arguments) in ({"zone": 1}, {"zone": 2}) and choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("fields", [{"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}], ids=["none", "no tools"])
def test_without_tools_the_prompt_is_plain(client: openai.OpenAI, model: str, fields: dict[str, Any]) -> None:
    """Breaks: tools that may not be called change the answer."""
    assert ask(client, model, max_tokens=8, **fields).message.content == ask(client, model, max_tokens=8).message.content


@pytest.mark.parametrize("where", ["tools", "arguments", "thoughts", "numbers", "content", "nowhere"])
def test_long_prompts_are_tokenized_outside_the_event_loop(
    client: openai.OpenAI, served: Served, model: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Breaks: all streams stop for a tenth of a second when a client sends a long list of tools, or long calls and thoughts."""
    tokenizer, in_loop = served.engine.tokenizer, dict[str, bool]()
    assert tokenizer is not None

    def encode(text: str, **_: object) -> list[int]:
        in_loop[text] = asyncio._get_running_loop() is not None
        return [5]

    monkeypatch.setattr(tokenizer, "encode", encode)
    long = "x" * 5000
    history: list[Any] = ASK
    if where in ("arguments", "thoughts"):
        arguments = json.dumps({"city": long if where == "arguments" else "Rome"})
        call = {"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        thoughts = {"reasoning_content": long} if where == "thoughts" else {}
        result = {"role": "tool", "tool_call_id": "call_0", "content": "20"}
        history = [*ASK, {"role": "assistant", "content": "", "tool_calls": [call], **thoughts}, result]
    elif where == "content":
        history = [{"role": "user", "content": long}]
    many = [tool("get_time", zone={"enum": [*range(5000)]})] if where == "numbers" else []
    described = [tool("read_file", path={"type": "string", "description": long})] if where == "tools" else []
    # The text cannot fit into the tiny model's context, which is found before tokens are made.
    monkeypatch.setattr("tide_serve.request.prompt_ids.check_text", lambda *_: None)
    ask(client, model, messages=history, tools=[WEATHER, *many, *described], max_tokens=1)
    [chat] = [text for text in in_loop if text.startswith("<|im_start|>")]
    assert in_loop[chat] == (where == "nowhere")


def test_the_template_sees_tools_calls_and_results(served: Served, model: str) -> None:
    """Breaks: the model is not told what it may call, what it has called, or what came of it."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": 1}'}}
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "noon"}]},
    ]
    prompt = prompt_of(served, messages, [TIME])
    assert prompt.startswith('<|im_start|>tools\n[{"type": "function", "function": {"name": "get_time"')
    assert '<|im_start|>assistant\n<tool_call>{"name": "get_time", "arguments": {"zone": 1}}</tool_call><|im_end|>' in prompt
    assert prompt.endswith("<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>assistant\n")


def prompt_of(served: Served, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    ids = httpx.post(f"{served.url}/tokenize", json={"messages": messages, "tools": tools}).json()["tokens"]
    text: str = httpx.post(f"{served.url}/detokenize", json={"tokens": ids}).json()["prompt"]
    return text


@pytest.fixture(scope="module")
def toolless(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], AbstractContextManager[Served]]:
    """A server of the same model with a template that knows nothing of tools."""
    import hashlib
    import shutil

    copy = Path(shutil.copytree(bundle, tmp_path_factory.mktemp("toolless") / "tiny-chat"))
    template = next(copy.rglob("*.jinja"))
    template.write_text(
        "{% for message in messages %}<|im_start|>{{ message['role'] + '\\n' + message['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    manifest = json.loads((copy / "manifest.json").read_text())
    raw = template.read_bytes()
    manifest["files"][str(template.relative_to(copy))] = {"sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    return lambda: serving(copy)


def test_a_template_without_tools_gets_them_as_text(toolless: Callable[[], AbstractContextManager[Served]]) -> None:
    """Breaks: models without a tool template never hear of the tools, or of what came of a call."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        *ASK,
        {"role": "assistant", "content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    with toolless() as served:
        prompt = prompt_of(served, messages, [TIME])
        plain = prompt_of(served, messages, [])
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        name = served.engine.manifest.model.name
        calls = ask(client, name, tools=[TIME], tool_choice="required", max_tokens=150).message.tool_calls
    assert prompt.startswith('<|im_start|>system\nBe brief.\n\nYou can call these functions:\n{"name": "get_time", "par')
    for text in (prompt, plain):
        assert 'assistant\nHm.\n<tool_call>\n{"name": "get_time", "arguments": {"zone": 1}}\n</tool_call><|im_end|>' in text
        assert "<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>" in text
    assert "You can call" not in plain
    assert calls and calls[0].function.name == "get_time"


TOOL = {"type": "function", "function": {"name": "f", "description": "does it", "parameters": {"type": "object"}}}


# Without the calls of the others, which these templates do not show.
NO_TOOLS = {name: template.partition("{% for c in m.tool_calls")[0] + "]{% endfor %}" for name, template in TEMPLATES.items()}


@pytest.mark.parametrize("roles", ["u", "su", "ucr", "uccrr", "ucru", "uccrrsu"])
@pytest.mark.parametrize("name", NO_TOOLS)
def test_described_tools_fit_every_template(name: str, roles: str) -> None:
    """Breaks: every request with tools is refused for Gemma, Llama 2 and early Mistral models, or the turn after two calls is."""
    template = NO_TOOLS[name]
    assert not analysed(template).forms.shows_calls
    turns = [with_calls_as_text(turn) for turn in template_messages(chat(roles))]
    prompt = render_chat(template, with_tools_described(turns, [TOOL]), special_tokens={})
    assert prompt.count("does it") == 1
    assert [prompt.count(f"#{index}#") for index in range(len(roles))] == [1] * len(roles)
