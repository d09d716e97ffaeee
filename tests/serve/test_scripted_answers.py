"""What becomes of the tokens of an answer on the way to a client: spaces, offsets, stop strings and calls, whole and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serve.live import Served, serving
from serve.scripted_model import make_scripted_bundle
from serve.sse import parsed, raw_events

PROMPT = "The capital of France is"
CALL = '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>'
ANSWERS: dict[str, list[str | int]] = {
    " is": [" Paris", " and", " Rome", "."],
    "@euro": [" costs", 0xE2, 0x82, 0xAC, "9", 0xFF, "!"],
    "@surrogate": [" " + CALL.format('{"a": "\\ud83d"}')],
    "@nan": ["So. ", CALL.format('{"x": NaN}')],
    "@other": ["Hi ", '<tool_call>\n{"name": "h", "arguments": {}}', "\n</tool_call> ok "],
    "@special": ["one", "<|im_end|>", "two"],
    "@python": ["<|python_tag|>", "f.call(x=", "1)"],
    "@code": ["<|python_tag|>!", "print(1)"],
    "@tag": ['<tool_call>\n{"name": "f", "arguments": {"a": "}', '</tool_call>"}}', "\n</tool_call>\n", "and more"],
    "<|fim_middle|>": [" return", " a", "<|file_sep|>"],
    "@list": ['[{"name": "f", "arguments": {"a": 1}},', ' {"name": "f", "arguments": "{\\"a\\": 2}"}]'],
}  # fmt: skip
GAP = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    words = [f" {word}" for word in PROMPT.split()]
    special = ["<|im_end|>", "<|python_tag|>", "<|python_tag|>!", *GAP, "<|file_sep|>"]
    with serving(make_scripted_bundle(tmp_path_factory.mktemp("scripted"), ANSWERS, words, special)) as served:
        yield served


@pytest.fixture(scope="module")
def scripted_http(scripted: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted.url, timeout=60) as client:
        yield client


def complete(http: httpx.Client, prompt: Any = PROMPT, **fields: Any) -> tuple[str, str, dict[str, Any] | None]:
    """Text, finish_reason and log-probabilities of a completion, which are the same in its stream."""
    body = {"model": "source", "prompt": prompt, **fields}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    parts = [part for event in parsed(raw_events(http, "/v1/completions", body)) for part in event["choices"]]
    assert "".join(part["text"] for part in parts) == choice["text"]
    assert parts[-1]["finish_reason"] == choice["finish_reason"]
    for name, values in (choice["logprobs"] or {}).items():
        assert [value for part in parts if part["logprobs"] for value in part["logprobs"][name]] == values
    return choice["text"], choice["finish_reason"], choice["logprobs"]


def chat(http: httpx.Client, content: str, **fields: Any) -> tuple[str | None, list[tuple[str, Any]], str]:
    """Content, calls and finish_reason of an answer, which are the same in its stream."""
    body = {"model": "source", "messages": [{"role": "user", "content": content}], **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
    events = parsed(raw_events(http, "/v1/chat/completions", body))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == (choice["message"]["content"] or "")
    assert [call["function"] for delta in deltas for call in delta.get("tool_calls", [])] == calls
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    named = [(call["name"], json.loads(call["arguments"], parse_constant=pytest.fail)) for call in calls]
    return choice["message"]["content"], named, choice["finish_reason"]


def test_a_completion_begins_with_a_space(scripted_http: httpx.Client) -> None:
    """Breaks: prompt and text, joined, have a word less than the model wrote."""
    assert complete(scripted_http)[:2] == (" Paris and Rome.", "stop")
    assert complete(scripted_http, max_tokens=1)[0] == " Paris"
    assert complete(scripted_http, echo=True)[0] == "The capital of France is Paris and Rome."


@pytest.mark.parametrize(("stop", "text"), [(" Paris", ""), ("Paris", " "), (" and", " Paris"), ("is Paris", " Paris and Rome.")])
def test_stop_strings_see_the_space(scripted_http: httpx.Client, stop: str, text: str) -> None:
    """Breaks: a stop string that begins with a space never ends a text."""
    assert complete(scripted_http, stop=stop)[0] == text


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", [PROMPT, "@euro", "tokens"])
def test_offsets_point_to_the_tokens(scripted: Served, scripted_http: httpx.Client, prompt: str, echo: bool) -> None:
    """Breaks: a client that marks tokens in the text marks other places."""
    sent = scripted.engine.tokenizer.encode(PROMPT) if prompt == "tokens" else prompt  # type: ignore[union-attr]
    text, _, logprobs = complete(scripted_http, sent, echo=echo, logprobs=1)
    assert logprobs is not None
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        hidden = token.startswith("bytes:") or token in ("<s>", "</s>")
        assert hidden or text[offset : offset + len(token)] == token, (text, logprobs)
    if prompt == "@euro":
        begin = text.index(" costs€9")
        assert logprobs["text_offset"][-8:] == [begin + place for place in (0, 6, 6, 6, 7, 8, 9, 10)]


@pytest.mark.parametrize(
    ("stop", "content"), [("<|im_end|>", "one"), ("<|im_end|>two", "one"), ("e<|im_end|>", "on"), ("|", "onetwo")]
)
def test_a_stop_string_may_be_a_special_token(scripted_http: httpx.Client, stop: str, content: str) -> None:
    """Breaks: stop: ["<|im_end|>"] of many clients is ignored, as the text never has it."""
    assert chat(scripted_http, "@special", stop=stop) == (content, [], "stop")


@pytest.mark.parametrize(
    ("content", "shown", "arguments"),
    [
        ("@surrogate", None, [{"a": "\ud83d"}]),
        ("@nan", "So. ", [{"x": None}]),
        ("@python", None, [{"x": 1}]),
        ("@list", None, [{"a": 1}, {"a": 2}]),
        ("@tag", "\nand more", [{"a": "}</tool_call>"}]),
    ],
)
def test_calls(scripted_http: httpx.Client, content: str, shown: str | None, arguments: list[Any]) -> None:
    """Breaks: a call that a model may write is an error 500, breaks a stream off, or comes as text."""
    assert chat(scripted_http, content, tools=TOOLS) == (shown, [("f", each) for each in arguments], "tool_calls")


def test_what_is_no_call_is_text_as_it_was(scripted_http: httpx.Client) -> None:
    """Breaks: text that looks like a call loses spaces, or shows a special token that it would not have without tools."""
    assert chat(scripted_http, "@other", tools=TOOLS) == chat(scripted_http, "@other")
    assert chat(scripted_http, "@other")[0] == 'Hi <tool_call>\n{"name": "h", "arguments": {}}\n</tool_call> ok '
    assert chat(scripted_http, "@code", tools=TOOLS) == ("print(1)", [], "stop")


def test_one_call_ends_the_output(scripted: Served, scripted_http: httpx.Client) -> None:
    """Breaks: with parallel_tool_calls false, a tag in an argument ends the call, or the model goes on behind it."""
    wanted = (None, [("f", {"a": "}</tool_call>"})], "tool_calls")
    assert chat(scripted_http, "@tag", tools=TOOLS, parallel_tool_calls=False) == wanted
    assert chat(scripted_http, "@list", tools=TOOLS, parallel_tool_calls=False) == (None, [("f", {"a": 1})], "tool_calls")
    body = {"model": "source", "messages": [{"role": "user", "content": "@tag"}], "tools": TOOLS, "parallel_tool_calls": False}
    assert scripted_http.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] == 3


def test_responses_have_the_calls(scripted_http: httpx.Client) -> None:
    """Breaks: /v1/responses finds other calls than /v1/chat/completions."""
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    for content, arguments in (("@surrogate", '{"a": "\\ud83d"}'), ("@python", '{"x": 1}')):
        body = {"model": "source", "input": content, "tools": tools}
        [item] = scripted_http.post("/v1/responses", json=body).json()["output"]
        assert (item["type"], item["arguments"]) == ("function_call", arguments)
        assert json.dumps(arguments)[1:-1] in scripted_http.post("/v1/responses", json={**body, "stream": True}).text


def test_a_gap_is_filled(scripted_http: httpx.Client) -> None:
    """Breaks: an editor shows what does not stand before its suffix, or another file's text."""
    assert complete(scripted_http, suffix=" France is", max_tokens=20)[:2] == (" return a", "stop")
    body = {"model": "source", "prompt": PROMPT, "suffix": " France is", "n": 2, "seed": 1}
    answer = scripted_http.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == [" return a"] * 2
    assert answer["usage"]["prompt_tokens"] == len(["<s>", *PROMPT.split(), *GAP, "France", "is"])
    assert complete(scripted_http, suffix="")[0] == complete(scripted_http)[0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"echo": True}, "echo"), ({"prompt": [5, 6]}, "prompt"), ({"suffix": " is" * 600}, "suffix"), ({"suffix": 5}, "suffix")],
)
def test_what_has_no_gap_is_refused(scripted_http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    """Breaks: a suffix is ignored, or fails the server."""
    answer = scripted_http.post("/v1/completions", json={"model": "source", "prompt": PROMPT, "suffix": " is", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
