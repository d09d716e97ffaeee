"""What agents and editors send, over HTTP: sessions of three turns with tools, whose answers a tiny model's script gives.

`clients/` has the shapes of their requests, written after their published sources: the fields of all requests, and what each
turn adds, with the answer before it in the client's own form. The packages openai, anthropic and litellm run unmodified.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from serve.live import Served, serving
from serve.scripted_model import make_scripted_bundle

RECORDED = {path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "clients").glob("*.json"))}
CALL = ' <tool_call>\n{{"name": "read", "arguments": {{"path": "{}"}}}}\n</tool_call>'
ANSWERS = {"@one": [CALL.format("a.txt")], "@two": [CALL.format("b.txt")], "@end": [" Done."]}
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}{% endfor %}"
)
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TOOL: Any = {"type": "function", "function": {"name": "read", "description": "Reads a file.", "parameters": SCHEMA}}
IDS = {"/v1/messages": "toolu_", "/v1/responses": "call_", "/v1/chat/completions": "call_"}
Answer = tuple[str, list[dict[str, Any]]]  # text, and the calls: id, name, arguments
Run = Callable[[str], list[Answer]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(make_scripted_bundle(tmp_path_factory.mktemp("clients"), ANSWERS, template=TEMPLATE)) as served:
        yield served


@pytest.fixture(scope="module")
def passed(request: pytest.FixtureRequest) -> Iterator[set[str]]:
    """Clients whose session went well; how many is printed at the end."""
    names: set[str] = set()
    yield names
    ran = {item.callspec.params["client"] for item in request.session.items if item.name.startswith("test_a_session[")}  # type: ignore[attr-defined]
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\nRESULT clients={len(ran)}\nRESULT client_failures={len(ran - names)}")


def _call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "name": name, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}


# --- recorded clients


def _replayed(recorded: dict[str, Any], url: str) -> list[Answer]:
    path, body = recorded["path"].partition("?")[0], recorded["body"]
    said: list[Any] = []
    answers: list[Answer] = []
    for turn in recorded["turns"]:
        text = json.dumps(turn)
        if answers:
            [call] = answers[-1][1]
            arguments = json.dumps(call["arguments"])
            marks = {'"$input"': arguments, "$arguments": json.dumps(arguments)[1:-1], "$id": call["id"]}
            for mark, value in marks.items():
                text = text.replace(mark, value)
        said += json.loads(text)
        sent = {**body, "input" if path == "/v1/responses" else "messages": said}
        reply = httpx.post(url + recorded["path"], json=sent, headers=recorded["headers"], timeout=60)
        assert reply.status_code == 200, reply.text
        documents = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")] or [reply.json()]
        assert '"model": "source"' in reply.text or '"model":"source"' in reply.text
        answers.append(_READERS[path](documents))
    return answers


def _read_chat(documents: list[Any]) -> Answer:
    parts = [choice.get("message") or choice["delta"] for each in documents for choice in each["choices"]]
    calls = [call for part in parts for call in part.get("tool_calls") or []]
    called = [_call(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
    return "".join(part.get("content") or "" for part in parts), called


def _read_messages(documents: list[Any]) -> Answer:
    blocks: list[Any] = [each["content_block"] for each in documents if each["type"] == "content_block_start"]
    for each in documents:
        if each["type"] == "content_block_delta":
            block = blocks[each["index"]]
            for name, key in (("text", "text"), ("partial_json", "input")):
                block[key] = (block.get(key) or "") + each["delta"].get(name, "")
    calls = [_call(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    return "".join(block["text"] for block in blocks if block["type"] == "text"), calls


def _read_response(documents: list[Any]) -> Answer:
    items = documents[-1]["response"]["output"]
    calls = [_call(item["call_id"], item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    return "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"]), calls


_READERS = {"/v1/chat/completions": _read_chat, "/v1/messages": _read_messages, "/v1/responses": _read_response}

# --- packages


def _openai(url: str) -> list[Answer]:
    messages: list[Any] = []
    answers: list[Answer] = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for key in ANSWERS:
            messages.append({"role": "tool", "tool_call_id": answers[-1][1][0]["id"], "content": key} if answers else _user(key))
            with client.chat.completions.stream(model="gpt-5", messages=messages, tools=[TOOL]) as stream:
                message = stream.get_final_completion().choices[0].message
            calls = [_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or []]
            answers.append((message.content or "", calls))
            messages.append(message)
    return answers


def _openai_responses(url: str) -> list[Answer]:
    items: list[Any] = []
    answers: list[Answer] = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for key in ANSWERS:
            result = {"type": "function_call_output", "output": key}
            items.append({**result, "call_id": answers[-1][1][0]["id"]} if answers else _user(key))
            include: Any = ["reasoning.encrypted_content"]
            tool: Any = {"type": "function", **TOOL["function"]}
            made = client.responses.create(
                model="gpt-5", input=items, tools=[tool], include=include, reasoning={"summary": "auto"}
            )
            calls = [_call(item.call_id, item.name, item.arguments) for item in made.output if item.type == "function_call"]
            answers.append((made.output_text, calls))
            items += made.output
    return answers


def _anthropic(url: str) -> list[Answer]:
    messages: list[Any] = []
    answers: list[Answer] = []
    tools: Any = [{"name": "read", "input_schema": SCHEMA}]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        assert client.models.list().data[0].display_name == "source"
        for key in ANSWERS:
            result = {"type": "tool_result", "content": [{"type": "text", "text": key}]}
            content = [{**result, "tool_use_id": answers[-1][1][0]["id"]}] if answers else key
            messages.append({"role": "user", "content": content})
            asked: Any = {"model": "claude", "max_tokens": 100, "messages": messages, "thinking": {"type": "adaptive"}}
            assert client.messages.count_tokens(model="claude", messages=messages, tools=tools).input_tokens
            with client.messages.stream(**asked, tools=tools) as stream:
                message = stream.get_final_message()
            calls = [_call(block.id, block.name, block.input) for block in message.content if block.type == "tool_use"]
            answers.append(("".join(block.text for block in message.content if block.type == "text"), calls))
            messages.append({"role": "assistant", "content": message.content})
    return answers


def _litellm(provider: str, suffix: str) -> Run:
    def run(url: str) -> list[Answer]:
        litellm = pytest.importorskip("litellm", reason="LiteLLM is not installed; pip install 'tide-llm[dev]'")
        messages: list[Any] = []
        answers: list[Answer] = []
        for key in ANSWERS:
            messages.append({"role": "tool", "tool_call_id": answers[-1][1][0]["id"], "content": key} if answers else _user(key))
            made = litellm.completion(
                model=f"{provider}/any", api_base=url + suffix, api_key="none", messages=messages, tools=[TOOL], max_tokens=100
            )
            message = made.choices[0].message
            calls = [_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or []]
            answers.append((message.content or "", calls))
            messages.append(message)
        return answers

    return run


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


PACKAGES: dict[str, Run] = {
    "package openai": _openai,
    "package openai, responses": _openai_responses,
    "package anthropic": _anthropic,
    "package litellm": _litellm("openai", "/v1"),
    "package litellm, anthropic": _litellm("anthropic", ""),
}


@pytest.mark.parametrize("client", [*RECORDED, *PACKAGES])
def test_a_session(server: Served, passed: set[str], client: str) -> None:
    """Breaks: a client's first request is answered with 400, or it does not find the calls and the text of an answer."""
    answers = PACKAGES[client](server.url) if client in PACKAGES else _replayed(RECORDED[client], server.url)
    calls = [[(call["name"], call["arguments"]) for call in called] for _, called in answers]
    assert calls == [[("read", {"path": "a.txt"})], [("read", {"path": "b.txt"})], []]
    assert answers[-1][0].strip() == "Done."
    if client in RECORDED:
        prefix = IDS[RECORDED[client]["path"].partition("?")[0]]
        assert all(call["id"].startswith(prefix) for _, called in answers for call in called)
    passed.add(client)
