"""What agents and editors send, over HTTP: sessions of three turns with tools, whose answers a tiny model's script gives.

`clients/` has the shapes of their requests, written after their published sources: the fields of all requests, and what each
turn adds, with the answer before it in the client's own form.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
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
IDS = {"/v1/messages": "toolu_", "/v1/responses": "call_", "/v1/chat/completions": "call_"}
Answer = tuple[str, list[dict[str, Any]]]  # text, and the calls: id, name, arguments


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(make_scripted_bundle(tmp_path_factory.mktemp("clients"), ANSWERS, template=TEMPLATE)) as served:
        yield served


def _call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "name": name, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}


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


@pytest.mark.parametrize("client", RECORDED)
def test_a_session(server: Served, client: str) -> None:
    """Breaks: a client's first request is answered with 400, or it does not find the calls and the text of an answer."""
    answers = _replayed(RECORDED[client], server.url)
    calls = [[(call["name"], call["arguments"]) for call in called] for _, called in answers]
    assert calls == [[("read", {"path": "a.txt"})], [("read", {"path": "b.txt"})], []]
    assert answers[-1][0].strip() == "Done."
    prefix = IDS[RECORDED[client]["path"].partition("?")[0]]
    assert all(call["id"].startswith(prefix) for _, called in answers for call in called)


@pytest.mark.slow  # its import takes seconds
@pytest.mark.parametrize(("provider", "suffix"), [("openai", "/v1"), ("anthropic", "")])
def test_a_session_of_litellm(server: Served, provider: str, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks: applications on LiteLLM, which reads answers by types of its own."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise its import looks for one on the internet
    litellm = pytest.importorskip("litellm", reason="LiteLLM is not installed; pip install 'tide-llm[dev]'")
    tool = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}
    asked = {"model": f"{provider}/any", "api_base": server.url + suffix, "api_key": "none", "tools": [tool], "max_tokens": 100}
    messages: list[Any] = [{"role": "user", "content": "@one"}]
    message = litellm.completion(**asked, messages=messages).choices[0].message
    [call] = message.tool_calls
    assert json.loads(call.function.arguments) == {"path": "a.txt"}
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "@end"}]
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**asked, messages=messages, stream=True)))
    assert streamed.choices[0].message.content.strip() == "Done."
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked, messages=messages, temperature=5)
