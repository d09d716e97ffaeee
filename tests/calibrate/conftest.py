"""What tests of training and tracing share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from export.architectures import tiny_model
from tide_calibrate.model.frozen import FrozenModel


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The products are tiny; more threads would spend the tests waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def llama() -> FrozenModel:
    """Tests must not change it."""
    return FrozenModel(tiny_model("llama"))
