"""The example that embeds an engine in an application."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from runtime.conftest import bundle, hf_model_directory
from tide_runtime import Engine, EngineOptions, ThreadOptions

from examples.serve_fastapi import make_service

__all__ = ["bundle", "hf_model_directory"]


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Engine]:
    with Engine.load(bundle, EngineOptions(threads=ThreadOptions(1))) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[TestClient]:
    with TestClient(make_service(engine), raise_server_exceptions=False) as client:
        yield client


def test_the_own_route_streams_the_engines_text(client: TestClient, engine: Engine) -> None:
    """A reader would copy a route that answers with another text than the engine's, or with none."""
    asked = "Explain in one sentence what this code does:\n\nx"
    prompt = engine.chat_prompt([{"role": "user", "content": asked}])
    [wanted] = engine.generate(prompt, engine.default_params(max_new_tokens=80))
    answer = client.post("/explain", content="x", headers={"Content-Type": "text/plain"})
    assert (answer.status_code, answer.text) == (200, wanted.text) and wanted.text


def test_a_prompt_that_is_too_long_is_refused_before_the_answer_begins(client: TestClient) -> None:
    """A client would get status 200 and an empty text."""
    answer = client.post("/explain", content="x " * 500, headers={"Content-Type": "text/plain"})
    assert answer.status_code == 400 and "tokens" in answer.json()["error"]["message"]


def test_the_whole_api_is_below_the_path(client: TestClient) -> None:
    """OpenAI's clients would not reach the mounted application, or its errors would be the outer one's."""
    assert client.get("/llm/").status_code == 200 and client.get("/llm/page/app.js").status_code == 200
    assert client.get("/llm/v1/nothing").json()["error"]["type"] == "not_found_error"
