"""/v1/embeddings with OpenAI's own client."""

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from export.tiny_embedding import CONFIG, ids_of, write_embedding_model
from serve.live import Served, serving
from tide_serve import ServeConfig

from tide_export import export

TEXTS = ["def add(a, b):", "a", "The quick brown fox"]
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def embedding_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model trained for vectors of 16 numbers too, with 64 cache slots."""
    folder = tmp_path_factory.mktemp("embedding")
    prompts = {"prompts": {"query": "Q: "}, "default_prompt_name": "query"}
    write_embedding_model(folder / "tiny-embedding", prompts=prompts, matryoshka_dimensions=[16])
    export(str(folder / "tiny-embedding"), folder / "out", CONFIG)
    return folder / "out"


@pytest.fixture(scope="module")
def embedding(embedding_bundle: Path) -> Iterator[Served]:
    with serving(embedding_bundle) as live:
        yield live


@pytest.fixture(scope="module")
def ask(embedding: Served) -> Iterator[Ask]:
    """``ask(input)``: the answer of ``client.embeddings.create``."""
    with openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield lambda given, **fields: client.embeddings.create(model="tiny-embedding", input=given, **fields)


def vectors(answer: Any) -> np.ndarray:
    assert [item.index for item in answer.data] == list(range(len(answer.data)))
    return np.array([item.embedding for item in answer.data], np.float32)


def post(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/embeddings", json=body, timeout=60)


def test_every_form_of_input(embedding: Served, ask: Ask) -> None:
    """Breaks: a client's texts come back in another order, without the model's prompt, or counted wrongly."""
    wanted = embedding.engine.embed(TEXTS)
    answer = ask(TEXTS)
    assert np.array_equal(vectors(answer), wanted)
    tokens = sum(len(ids_of(f"Q: {text}")) for text in TEXTS)
    assert (answer.model, answer.object, answer.data[0].object) == ("tiny-embedding", "list", "embedding")
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    assert np.array_equal(vectors(ask(TEXTS[0])), wanted[:1])
    assert np.array_equal(vectors(ask([ids_of(f"Q: {text}") for text in TEXTS])), wanted)
    assert np.array_equal(vectors(ask(ids_of(f"Q: {TEXTS[1]}"))), wanted[1:2])


def test_both_encodings_have_the_same_numbers(embedding: Served) -> None:
    """Breaks: clients that ask for base64 read numbers of another type or byte order."""
    body = {"model": "tiny-embedding", "input": "abc"}
    plain = post(embedding.url, **body, encoding_format="float").json()["data"][0]["embedding"]
    coded = post(embedding.url, **body, encoding_format="base64").json()["data"][0]["embedding"]
    assert np.array_equal(np.frombuffer(base64.b64decode(coded), "<f4"), np.array(plain, np.float32))
    assert post(embedding.url, **body).json()["data"][0]["embedding"] == plain


def test_more_texts_than_the_queue_holds(embedding_bundle: Path) -> None:
    """Breaks: a batch of documents is refused with 429, although nothing else runs."""
    with serving(embedding_bundle, max_queue=3, max_batch=2) as live:
        answer = post(live.url, model="tiny-embedding", input=[f"{number}" for number in range(20)])
        assert answer.status_code == 200, answer.text
        found = [item["embedding"] for item in answer.json()["data"]]
        assert np.array_equal(np.array(found, np.float32), live.engine.embed([f"{number}" for number in range(20)]))


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        ({"input": []}, "input", "empty list"),
        ({"input": ["a", []]}, "input", "list"),
        ({"input": [[]]}, "input", "prompt is empty"),
        ({"input": {"text": "a"}}, "input", "object"),
        ({"input": [1, 500]}, "input", "token id 500"),
        ({"input": "x" * 65}, "input", "the context holds 64"),
        ({"input": ["a"] * 2049}, "input", "at most 2048"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'int8'"),
        ({"input": "a", "dimensions": "16"}, "dimensions", "'16'"),
        ({"input": "a", "truncate": True}, "truncate", "not supported"),
        ({}, "input", "missing"),
    ],
)
def test_bad_requests_name_the_field(embedding: Served, body: dict[str, Any], param: str, word: str) -> None:
    """Breaks: a client's mistake ends in an error of the server, or in a vector of something else."""
    answer = post(embedding.url, model="tiny-embedding", **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"].partition("[")[0] == param and word in error["message"], error


def test_models_do_one_of_both(embedding: Served, live_server: str, model: str) -> None:
    """Breaks: an embedding model writes noise, or a chat model's states are stored as embeddings."""
    answer = post(live_server, model=model, input="a")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_embeddings")
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    others = {"completions": {"prompt": "a"}, "responses": {"input": "a"}, "messages": {**chat, "max_tokens": 1}}
    for path, body in {"chat/completions": chat, **others}.items():
        refused = httpx.post(f"{embedding.url}/v1/{path}", json={"model": "tiny-embedding", **body}, timeout=60)
        assert refused.status_code == 404 and "send them to /v1/embeddings" in refused.json()["error"]["message"], refused.text


def test_the_time_limit_holds(embedding_bundle: Path) -> None:
    """Breaks: a request waits for ever behind others."""
    with serving(embedding_bundle, ServeConfig(request_timeout=0.001), prefill_chunk=1) as live:
        answer = post(live.url, model="tiny-embedding", input=["x" * 60] * 200)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "timeout")
        live.wait_idle()
