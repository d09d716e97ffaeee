"""/v1/models, /tokenize and /detokenize."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx
import openai
from serve.live import Served
from tide_serve import ServeConfig

HI = [{"role": "user", "content": "Hi é"}]


def test_models(client: openai.OpenAI, served: Served, model: str) -> None:
    """Breaks: clients that look up the model's name or its context before they ask."""
    [listed] = client.models.list().data
    assert (listed.id, listed.object) == (model, "model") and client.models.retrieve(model) == listed
    fields = listed.model_dump()
    assert fields["max_model_len"] == served.engine.manifest.max_seq_len
    assert fields["tool_calls"] == '<tool_call>{"name": "FUNCTION", "arguments": {"ARGUMENT": "VALUE"}}</tool_call>'
    assert "tool_calls_note" not in fields


def test_names_of_the_server(serve_app: Callable[..., AbstractContextManager[Served]]) -> None:
    """Breaks: a name with a slash, as of the hub, cannot be looked up; or an answer names another model than was asked."""
    with serve_app(ServeConfig(model_names=("org/tiny", "gpt-4"))) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        assert [listed.id for listed in client.models.list().data] == ["org/tiny", "gpt-4"]
        assert client.models.retrieve("org/tiny").id == "org/tiny"
        assert client.completions.create(model="gpt-4", prompt="def", max_tokens=1).model == "gpt-4"


def test_tokens_of_text(http: httpx.Client, served: Served) -> None:
    """Breaks: prompts are counted in other tokens than the engine computes."""
    text = "def add é"
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == served.engine.tokenizer.encode(text)  # type: ignore[union-attr]
    assert (answer["count"], answer["max_model_len"]) == (len(answer["tokens"]), 512)
    assert answer["token_strs"][:2] == ["def", " add"] and answer["token_strs"][-1] == "bytes:\\xa9"
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_tokens_of_a_chat(http: httpx.Client, client: openai.OpenAI, model: str) -> None:
    """Breaks: a client that trims its conversation by count is off by the template."""
    answer = http.post("/tokenize", json={"model": model, "messages": HI}).json()
    usage: Any = client.chat.completions.create(model=model, messages=HI, max_tokens=1).usage  # type: ignore[arg-type]
    assert answer["count"] == usage.prompt_tokens
    text = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n"
