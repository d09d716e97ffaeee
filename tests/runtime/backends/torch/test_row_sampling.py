"""Tokens drawn from what a device finds in a row are those that the host draws from the whole row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tide_runtime.backends.device.device_rows import DeviceRows
from tide_runtime.backends.device.element_types import ELEMENT_TYPES
from tide_runtime.backends.torch.row_sampling import TorchRowSampling
from tide_runtime.backends.torch.stream import ProcessorDevice, ProcessorStream
from tide_runtime.errors import NumericsError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.kept_tokens import TINY, weights
from tide_runtime.sampler import Sampler

DRAWS = 80
VOCAB = 3000


def race_bounds(row: torch.Tensor, best: torch.Tensor, temperature: float, key: list[int], position: int) -> torch.Tensor:
    """The kernel of this name in NumPy."""
    generator = np.random.Philox(key=np.array(key, np.uint64), counter=np.array([0, position, 0, 0], np.uint64))
    left = (np.invert(generator.random_raw(len(row))) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    with np.errstate(invalid="ignore"):  # of broken logits
        return torch.from_numpy(left / np.maximum(weights(row.numpy(), temperature, np.float32(best)), TINY))


class Rows:
    """Rows in memory that counts how often one is read whole."""

    def __init__(self, logits: NDArray[Any], races: bool = True) -> None:
        stream, self.reads = ProcessorStream(ProcessorDevice()), 0
        stream.kernels = SimpleNamespace(race_bounds=race_bounds) if races else None
        name = {np.float32: "fp32", np.float16: "fp16"}[logits.dtype.type]
        sampling = TorchRowSampling(stream, logits.shape[1], {"fp32": torch.float32, "fp16": torch.float16}[name])
        device = SimpleNamespace(download=self._download, synchronize=stream.device.synchronize)
        owner: Any = logits
        self._memory = stream.device
        self.rows = DeviceRows(device, logits.ctypes.data, logits.shape, ELEMENT_TYPES[name], owner, None, sampling)  # type: ignore[arg-type]

    def _download(self, target: NDArray[Any], pointer: int) -> None:
        self.reads += 1
        self._memory.download(target, pointer)


def made_logits(random: np.random.Generator, rows: int = DRAWS, vocab: int = VOCAB, dtype: Any = np.float32) -> NDArray[Any]:
    """Logits with few likely tokens, as language models have."""
    logits = random.normal(0, 2, (rows, vocab))
    logits[:, :: vocab // 20] += random.normal(6, 4, logits[:, :: vocab // 20].shape)
    return logits.astype(dtype)


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 50},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.8},
    {"top_p": 0.95, "min_p": 0.02},
]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("changes", FILTERS)
def test_the_device_tells_what_the_host_draws(changes: dict[str, Any], dtype: Any) -> None:
    """Breaks: a request with a seed gives other text on a GPU, where each token is taken from a row's largest logits."""
    random = np.random.default_rng(0)
    logits = made_logits(random, dtype=dtype)
    sampler, found = Sampler(GenerationParams(temperature=0.7, seed=5, **changes), VOCAB), Rows(logits)
    for position, row in enumerate(logits):
        seen = np.zeros(position, np.int64)
        assert sampler.sample(found.rows[position], seen) == sampler.sample(row.astype(np.float32), seen)
    assert found.reads < DRAWS // 8  # the device tells nearly always


@pytest.mark.parametrize("changes", FILTERS)
@pytest.mark.parametrize("kind", ["tied", "flat", "masked", "small"])
def test_rows_that_the_largest_logits_do_not_decide_are_read(changes: dict[str, Any], kind: str) -> None:
    """Breaks: a token tied with the last of the largest, or one that the largest do not reach, is lost."""
    random = np.random.default_rng(1)
    logits = made_logits(random, 30, 300 if kind == "small" else VOCAB)
    if kind == "tied":
        logits = np.round(logits / 4)
    elif kind == "flat":
        logits *= 0.01
    elif kind == "masked":
        logits[random.random(logits.shape) < 0.9] = -np.inf
    sampler, found = Sampler(GenerationParams(temperature=1.3, seed=2, **changes), logits.shape[1]), Rows(logits)
    for position, row in enumerate(logits):
        seen = np.zeros(position, np.int64)
        assert sampler.sample(found.rows[position], seen) == sampler.sample(row, seen)
    if kind in ("tied", "flat") and "top_p" in changes and "top_k" not in changes:
        assert found.reads > 0


def test_without_a_kernel_the_row_is_read() -> None:
    """Breaks: sampling without filters fails on GPUs for which Triton compiles nothing."""
    logits = made_logits(np.random.default_rng(2), 5)
    sampler, found = Sampler(GenerationParams(temperature=1.0, seed=2), VOCAB), Rows(logits, races=False)
    for position, row in enumerate(logits):
        assert sampler.sample(found.rows[position], np.zeros(position)) == sampler.sample(row, np.zeros(position))
    assert found.reads == len(logits)


@pytest.mark.parametrize("changes", [{}, {"top_k": 5}, {"top_p": 0.9}])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_are_reported(changes: dict[str, Any], bad: float) -> None:
    """Breaks: a model that overflowed on a GPU yields fluent-looking nonsense."""
    logits = made_logits(np.random.default_rng(3), 1)
    logits[0, 7] = bad
    with pytest.raises(NumericsError, match="token 7"):
        Sampler(GenerationParams(temperature=1.0, **changes), VOCAB).sample(Rows(logits).rows[0], np.zeros(1))


def test_penalties_are_the_hosts() -> None:
    """Breaks: a token's penalty is left out, because the device finds the largest logits before it."""
    logits = made_logits(np.random.default_rng(4), 1)
    params = GenerationParams(temperature=0.7, seed=2, top_k=3, logit_bias=((9, 100.0),))
    assert Sampler(params, VOCAB).sample(Rows(logits).rows[0], np.zeros(1, np.int64)) == 9
