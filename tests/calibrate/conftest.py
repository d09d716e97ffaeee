"""Fixtures shared by the tests of training and tracing."""

from collections.abc import Iterator

import pytest
import torch
from export.architectures import tiny_model
from tide_calibrate.model.frozen import FrozenModel


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: matrices are tiny, so more threads would mostly synchronize."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def llama() -> FrozenModel:
    """A tiny Llama; shared, so tests must not modify it."""
    return FrozenModel(tiny_model("llama"))
