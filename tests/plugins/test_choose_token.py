"""The kernel that chooses tokens gives those of the runtime's `Sampler`, or leaves them to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from plugins.host_driver import HostDriver, on_host
from tide_plugins.conformance.case import ELEMENTS
from tide_plugins.launch.decode_loop import prepare_choose_token
from tide_runtime.generation_params import GenerationParams
from tide_runtime.kept_tokens import TINY
from tide_runtime.sampler import Sampler

VOCAB, SEQUENCES, TOKENS = 3001, 16, 2
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "chat": {"temperature": 0.7, "top_p": 0.9},
    "top_k": {"temperature": 1.0, "top_k": 50, "top_p": 0.95},
    "min_p": {"temperature": 1.3, "min_p": 0.05},
    "all": {"temperature": 1.0, "top_k": 200, "top_p": 0.8, "min_p": 0.02},
    "flat": {"temperature": 3.0, "top_p": 0.99},
    "sharp": {"temperature": 0.05, "top_k": 40, "top_p": 0.9},
    "tiny": {"temperature": 1e-40, "top_p": 0.5},
    "all kept": {"temperature": 0.6, "top_k": 10**12, "top_p": 1 - 1e-9},
    "hardly any": {"temperature": 1.0, "top_p": 1e-9},
    "best only": {"temperature": 1.0, "min_p": 1.0},
}


def chosen(logits: NDArray[Any], samplers: list[Sampler], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    params = [sampler.params for sampler in samplers]
    tensors = {
        "logits": logits,
        "temperature": np.array([max(one.temperature, TINY) for one in params], np.float32),
        "top_k": np.array([min(one.top_k, VOCAB) for one in params], np.int32),
        "tail": np.array([1 - one.top_p for one in params], np.float32),
        "min_p": np.array([one.min_p for one in params], np.float32),
        "key": np.stack([sampler.key for sampler in samplers]),
        "length": lengths,
        "finished": np.zeros(len(params), np.uint8),
        "chosen": np.zeros(len(logits), np.int64),
    }
    arrays = {name: on_host(array) for name, array in tensors.items()}
    prepare_choose_token(HostDriver(order=2).kernels(), stream=0, **arrays).enqueue(0)
    return tensors["chosen"]


@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_tokens_are_those_of_the_sampler(setting: dict[str, Any], dtype: str) -> None:
    """Guards against a text that depends on whether the device or the host draws, and against a device that seldom does."""
    rng = np.random.default_rng(5)
    logits = (3 * rng.standard_normal((SEQUENCES * TOKENS, VOCAB))).astype(ELEMENTS[dtype])
    samplers = [Sampler(GenerationParams(seed=seed, **setting), VOCAB) for seed in range(SEQUENCES)]
    lengths = rng.integers(0, 4000, SEQUENCES)
    found = chosen(logits, samplers, lengths)
    for row, token in enumerate(found.tolist()):
        seen = np.zeros(lengths[row // TOKENS] + 1 + row % TOKENS, np.int64)
        assert token in (-1, samplers[row // TOKENS].sample(logits[row].astype(np.float32), seen))
    print(f"RESULT in_doubt_share={(found == -1).mean():.4f}")
    assert (found == -1).sum() <= 1
