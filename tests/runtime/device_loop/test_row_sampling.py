"""Tokens that a device draws, in steps that the host drives, are those that the host draws from the whole row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from runtime.device_loop.test_decode_loop import PROMPTS, Driven
from runtime.device_loop.test_host_rows import SAMPLED
from runtime.device_loop.test_plugin_kernels import SimulatedDriver
from runtime.numpy_loop_kernels import NumpyLoopKernels
from runtime.simulated_gpu import SimulatedGpu
from runtime.tiny_generation import Request, make_row, output
from tide_plugins.loop_kernels import PluginLoopKernels
from tide_runtime.backends.device.device_rows import DeviceRows
from tide_runtime.backends.device.element_types import ELEMENT_TYPES, FP32
from tide_runtime.device_loop.row_sampling import DeviceRowSampling
from tide_runtime.errors import NumericsError, TargetError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sampler import Sampler
from tide_runtime.scheduling.step import run
from tide_runtime.sequence import TokenSequence

DRAWS = 20
VOCAB = 3000


class Rows:
    """Rows in the memory of a GPU."""

    def __init__(self, logits: NDArray[Any]) -> None:
        driver, gpu = SimulatedDriver(order=1), SimulatedGpu()
        driver.gpu = gpu
        element = ELEMENT_TYPES[{"float32": "fp32", "float16": "fp16"}[logits.dtype.name]]
        kernels: Any = PluginLoopKernels(driver.kernels(), gpu.stream)
        sampling, memory = DeviceRowSampling(gpu, kernels, element, logits.shape[1]), gpu.allocate(logits.nbytes)
        gpu.upload(memory.pointer, logits)
        self.rows = DeviceRows(gpu, memory.pointer, logits.shape, element, memory, None, sampling)  # type: ignore[arg-type]
        self._gpu, self._row_bytes = gpu, logits[0].nbytes

    @property
    def reads(self) -> int:
        """How often a row was read whole."""
        return self._gpu.downloads.count(self._row_bytes)


def made_logits(random: np.random.Generator, rows: int = DRAWS, vocab: int = VOCAB, dtype: Any = np.float32) -> NDArray[Any]:
    """Logits with few likely tokens, as language models have."""
    logits = random.normal(0, 2, (rows, vocab))
    logits[:, :: vocab // 20] += random.normal(6, 4, logits[:, :: vocab // 20].shape)
    return logits.astype(dtype)


FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "best": {"top_k": 1},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.05},
    "top_k and top_p": {"top_k": 20, "top_p": 0.8},
    "top_p and min_p": {"top_p": 0.95, "min_p": 0.02},
    "flat": {"temperature": 3.0, "top_p": 0.99},
    "sharp": {"temperature": 0.05, "top_k": 40, "top_p": 0.9},
    "tiny": {"temperature": 1e-40, "top_p": 0.5},
    "all kept": {"top_k": 10**12, "top_p": 1 - 1e-9},
    "hardly any": {"top_p": 1e-9},
    "best only": {"min_p": 1.0},
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("changes", FILTERS.values(), ids=FILTERS)
def test_the_device_tells_what_the_host_draws(changes: dict[str, Any], dtype: Any) -> None:
    """Breaks: a request with a seed gives other text on a GPU, or the device seldom draws."""
    random = np.random.default_rng(0)
    logits = made_logits(random, dtype=dtype)
    sampler, found = Sampler(GenerationParams(**{"temperature": 0.7, "seed": 5, **changes}), VOCAB), Rows(logits)
    for position, row in enumerate(logits):
        seen = np.zeros(position, np.int64)
        assert sampler.sample(found.rows[position], seen) == sampler.sample(row.astype(np.float32), seen)
    assert found.reads <= 1


@pytest.mark.parametrize("changes", [*FILTERS.values()][:7], ids=[*FILTERS][:7])
@pytest.mark.parametrize("kind", ["tied", "flat", "masked", "small"])
def test_rows_with_many_equals_are_drawn_as_well(changes: dict[str, Any], kind: str) -> None:
    """Breaks: a token tied with the last that a filter keeps is lost, or one too many is kept."""
    random = np.random.default_rng(1)
    logits = made_logits(random, 10, 300 if kind == "small" else VOCAB)
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


class _Uncompiled(NumpyLoopKernels):
    def choose_token(self, *_: Any) -> Any:
        raise TargetError("NVRTC is missing")


def texts(sampling: str, penalised: bool = False) -> tuple[SimulatedGpu, list[Any]]:
    """Texts of steps that the host drives, side by side, and the GPU. ``sampling``: what draws."""
    driven = Driven(logits=FP32)
    gpu, made = driven.gpu, {"device": NumpyLoopKernels, "uncompiled": _Uncompiled}.get(sampling)
    if made is not None:
        kernels: Any = made(gpu)
        driven.backend.row_sampling = DeviceRowSampling(gpu, kernels, FP32, driven.manifest.model.vocab_size)  # type: ignore[assignment]
    rows = list[TokenSequence]()
    for seat, (prompt, changes) in enumerate(zip(PROMPTS, SAMPLED, strict=True)):
        penalty = {"presence_penalty": 0.5} if penalised and seat == 1 else {}
        params: Any = GenerationParams(max_new_tokens=12, **changes, **penalty)
        rows.append(make_row(Request(prompt, params, seat), driven.manifest))
    for _ in run(driven.policy.inner, driven.backend.context(5), rows):  # type: ignore[arg-type]
        pass
    return gpu, [output(row) for row in rows]


@pytest.mark.parametrize("penalised", [False, True])
def test_the_rows_of_a_step_are_drawn_together(penalised: bool) -> None:
    """Breaks: a step waits for the device once for each of its rows, or draws a row whose logits penalties change."""
    gpu, found = texts("device", penalised)
    assert found == texts("host", penalised)[1]
    prompts = 4  # whose logits are kept while another prompt runs
    assert gpu.downloads.count(4 * 11) == prompts + (11 if penalised else 0)
    assert gpu.downloads.count(8 * 8) <= 11 + prompts  # tokens, of up to eight rows


def test_without_a_kernel_rows_are_read() -> None:
    """Breaks: every sampled request fails on a machine that compiles no kernels."""
    with pytest.warns(RuntimeWarning, match="NVRTC is missing; the host draws sampled tokens"):
        assert texts("uncompiled")[1] == texts("host")[1]


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
