"""Recorded requests with what the server answers, whole and streamed, of models whose texts are scripts.

``python -m serve.test_transcripts`` in tests/ records the answers in transcripts.json anew. Read what changed before you keep it:
clients read these fields.
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import httpx
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from serve.live import serving
from serve.scripted_model import TEMPLATE, make_scripted_bundle
from tide_runtime.backends.kv_caches import BLOCK_TOKENS

FILE = Path(__file__).with_name("transcripts.json")
CALL = '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>'
PROMPT = "The capital of France is"
PLAIN: dict[str, list[str | int]] = {
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
    "@empty": [],
}  # fmt: skip
SPECIAL = [
    "<|im_end|>",
    "<|python_tag|>",
    "<|python_tag|>!",
    "<|fim_prefix|>",
    "<|fim_suffix|>",
    "<|fim_middle|>",
    "<|file_sep|>",
]
# The answer depends on the last token only, so a turn has no marks. Thoughts of earlier turns are left out.
THINKING_TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' and loop.last and message.reasoning_content %}
        {{- '<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {{- message.content or '' }}
{%- endfor %}
{%- if enable_thinking is defined %}{{- '<think>' if enable_thinking else '<think></think>' }}{% endif %}"""
THINKING: dict[str, list[str | int]] = {
    "@aloud": ["<think>", "Let", " me", " see", ":", CALL.format("{}"), "</think>", "Forty", " two", "."],
    "@call": ["<think", ">x </", "think>", "\n\n", CALL.format('{"a": 1}')],
    "@silent": [" Just", " this"],
    "@cut": ["<think>\n\n", "On", " and", " on"],
    "@unended": ["<think>.", CALL.format('{"a": 2}')],
    "@code": ["<think>,", "</think>\t", "return"],
}
MODELS: dict[str, Callable[[Path], Path]] = {
    "plain": lambda folder: make_scripted_bundle(folder, PLAIN, [f" {w}" for w in PROMPT.split()], SPECIAL, TEMPLATE),
    "thinking": lambda folder: make_scripted_bundle(folder, THINKING, [" w"], ["<think>", "</think>"], THINKING_TEMPLATE),
}


def _by_type(events: Any) -> dict[str, Any]:
    return {get_args(event.model_fields["type"].annotation)[0]: event for event in get_args(get_args(events)[0])}


# Types of an answer and of its events, as the clients' packages have them.
TYPES: dict[str, tuple[Any, Any]] = {
    "/v1/chat/completions": (ChatCompletion, ChatCompletionChunk),
    "/v1/completions": (Completion, Completion),
    "/v1/messages": (Message, _by_type(RawMessageStreamEvent)),
    "/v1/responses": (Response, _by_type(ResponseStreamEvent)),
}
VOLATILE = ("created", "created_at", "completed_at", "system_fingerprint", "depth")
IDS = ("id", "item_id", "call_id", "signature")


def masked(document: Any, ids: dict[str, str]) -> Any:
    """``document`` with ids numbered in the order in which they come, and without times and figures of the machine."""
    if isinstance(document, list):
        return [masked(one, ids) for one in document]
    if not isinstance(document, dict):
        return round(document, 5) if isinstance(document, float) else document
    found = {}
    for key, value in document.items():
        if key in IDS and isinstance(value, str):
            found[key] = ids.setdefault(value, f"{value.partition('-')[0].partition('_')[0]} {len(ids)}")
        elif key in VOLATILE:
            found[key] = value is not None
        elif key != "sequence_number":
            found[key] = masked(value, ids)
    return found


def joined(events: list[Any]) -> list[Any]:
    """Events that may come together are one: of the same fields but for texts, lists and what the model says in a chat."""
    found: list[Any] = []
    for event in events:
        together = _sum(found[-1], event) if found else DIFFERENT
        if together is DIFFERENT:
            found.append(event)
        else:
            found[-1] = together
    return found


def _sum(first: Any, second: Any, key: str = "") -> Any:
    """The event of two, DIFFERENT where they are of different kinds."""
    if isinstance(first, dict) and isinstance(second, dict):
        both = {**first, **second}
        if first.keys() != second.keys() and (key != "delta" or "role" in first):
            return DIFFERENT
        parts = {name: _sum(first[name], second[name], name) if name in first and name in second else both[name] for name in both}
        return DIFFERENT if DIFFERENT in parts.values() else parts
    if isinstance(first, list) and isinstance(second, list):
        if key != "choices":
            return first + second
        one = _sum(first[0], second[0]) if len(first) == len(second) == 1 else DIFFERENT
        return one if one is DIFFERENT else [one]
    if isinstance(first, str) and isinstance(second, str) and key in TEXTS:
        return first + second
    return first if first == second else DIFFERENT


DIFFERENT = object()
TEXTS = ("content", "reasoning_content", "text", "thinking", "delta", "partial_json")


def asked(http: httpx.Client, case: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The answer, and the events of its stream."""
    path, body, ids = case["path"], {"model": "source", **case["body"]}, dict[str, str]()
    answer = http.post(path, json=body)
    if answer.status_code != 200:
        return {"status": answer.status_code, "error": masked(answer.json()["error"], ids)}, []
    whole, event = TYPES[path]
    typed = "extension" not in case  # formats that OpenAI's types do not know
    if typed:
        _validate(whole, answer.json())
    stream = http.post(path, json={**body, "stream": True, **case.get("stream", {})})
    assert stream.status_code == 200 and stream.headers["content-type"].startswith("text/event-stream"), stream.text
    documents, names = [], path in ("/v1/messages", "/v1/responses")
    blocks = stream.content.decode().removesuffix("\n\n").split("\n\n")
    assert names or blocks.pop() == "data: [DONE]"
    for block in blocks:
        name, _, data = block.rpartition("\n")
        documents.append(json.loads(data.removeprefix("data: ")))
        assert name == (f"event: {documents[-1]['type']}" if names else "")
        if typed:
            _validate(event[documents[-1]["type"]] if names else event, documents[-1])
    if not names:  # those of a choice stand together: its tokens may come among those of another
        assert all(one["choices"] for one in documents[:-1])
        documents.sort(key=lambda one: one["choices"][0]["index"] if one["choices"] else math.inf)
    if path == "/v1/responses":
        assert all(one["sequence_number"] == number for one, number in zip(documents, count(), strict=False))
    return masked(answer.json(), ids), joined(masked(documents, {}))


def _validate(kind: Any, document: Any) -> None:
    """The clients themselves read anything. Completion lacks the null of an echo's first token, and of a choice that goes on."""
    if kind is not Completion:
        kind.model_validate(document)
    elif "[null" not in json.dumps(document):
        choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in document["choices"]]
        kind.model_validate({**document, "choices": choices})


CASES: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], httpx.Client]]:
    """``clients(model)``: of a server of a scripted model."""
    with ExitStack() as stack:

        @cache
        def make(model: str) -> httpx.Client:
            served = stack.enter_context(serving(MODELS[model](tmp_path_factory.mktemp(model))))
            return stack.enter_context(httpx.Client(base_url=served.url, timeout=60))

        yield make


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_an_answer_is_the_recorded_one(clients: Callable[[str], httpx.Client], case: dict[str, Any]) -> None:
    """Breaks: a client of OpenAI's or Anthropic's API finds other fields, texts, calls, thoughts or events."""
    answer, events = asked(clients(case["model"]), case)
    assert answer == case["answer"]
    assert events == case.get("events", [])


def test_thoughts_that_the_template_drops_keep_the_prefix_before_them(clients: Callable[[str], httpx.Client]) -> None:
    """Breaks: each turn of a chat computes its whole history again."""

    def answer(*turns: dict[str, str]) -> Any:
        body = {"model": "source", "messages": turns, "cache_salt": "turns"}
        return clients("thinking").post("/v1/chat/completions", json=body).json()

    question = {"role": "user", "content": " w" * 2 * BLOCK_TOKENS + "@aloud"}
    said = answer(question)["choices"][0]["message"]
    again = answer(question, said, {"role": "user", "content": " w@silent"})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * BLOCK_TOKENS


def _record() -> None:
    with TemporaryDirectory() as folder:
        for model, make in MODELS.items():
            (Path(folder) / model).mkdir()
            with serving(make(Path(folder) / model)) as served, httpx.Client(base_url=served.url, timeout=60) as http:
                for case in CASES:
                    if case["model"] == model:
                        case["answer"], case["events"] = asked(http, case)
    compact = [
        "{"
        + ",\n ".join(
            f'"{key}": [\n  ' + ",\n  ".join(json.dumps(one, ensure_ascii=False) for one in value) + "]"
            if key == "events"
            else f'"{key}": {json.dumps(value, ensure_ascii=False)}'
            for key, value in case.items()
            if value or key != "events"
        )
        + "}"
        for case in CASES
    ]
    FILE.write_text("[" + ",\n".join(compact) + "]\n", encoding="utf-8")


if __name__ == "__main__":
    _record()
