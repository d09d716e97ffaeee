"""A live server with a tiny random chat model for the tests of the HTTP interface."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
from serve.live import Served, serving
from serve.tiny_model import make_bundle, make_model
from shared_once import shared_once


@pytest.fixture(scope="session")
def hf_model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as its authors would publish it."""
    return shared_once(tmp_path_factory, "models/tiny-chat", make_model)


@pytest.fixture(scope="session")
def bundle(hf_model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a tiny random Llama with 512 cache slots and a template that knows tools. Shared: do not change it."""
    return shared_once(tmp_path_factory, "bundles/tiny-chat", lambda folder: make_bundle(hf_model_directory, folder))


@pytest.fixture(scope="session")
def serve_app(bundle: Path) -> Callable[..., AbstractContextManager[Served]]:
    """``with serve_app(ServeConfig(…), max_batch=1) as served``: a server of its own, with engine options where given."""
    return partial(serving, bundle)


@pytest.fixture(scope="session")
def served(serve_app: Callable[..., AbstractContextManager[Served]]) -> Iterator[Served]:
    """The shared server with default options, max_batch 4 and one thread."""
    with serve_app() as live:
        yield live


@pytest.fixture(scope="session")
def live_server(served: Served) -> str:
    """The shared server's address, without ``/v1``."""
    return served.url


@pytest.fixture(scope="session")
def model(served: Served) -> str:
    """The name that the shared server gives its model."""
    return served.engine.manifest.model.name


@pytest.fixture(scope="session")
def client(live_server: str) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, which does not try again where it failed."""
    with openai.OpenAI(base_url=f"{live_server}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def http(live_server: str) -> Iterator[httpx.Client]:
    """A plain client of the shared server."""
    with httpx.Client(base_url=live_server, timeout=60) as client:
        yield client
