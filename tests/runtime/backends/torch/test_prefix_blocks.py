"""Prefixes on target torch: what rows take over from earlier texts, and what that does to the texts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runtime.backends.cache_shapes import MIXED, UNPAGED, WITH_PAIRS
from runtime.backends.torch.test_backend import SimulatedStream
from runtime.numpy_loop_kernels import NumpyLoopKernels
from runtime.simulated_gpu import SimulatedGpu
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.backends.device.device_caches import DeviceCaches
from tide_runtime.backends.device.element_types import ELEMENT_TYPES
from tide_runtime.backends.kv_caches import BLOCK_TOKENS
from tide_runtime.backends.step_arrays import RowEnds
from tide_runtime.backends.torch.backend import TorchBackend
from tide_runtime.backends.torch.prefix_blocks import TorchPrefixBlocks
from tide_runtime.bundle import Bundle
from tide_runtime.depth.full import FullDepth
from tide_runtime.device_loop.device_policy import DeviceLoopPolicy, Drivers
from tide_runtime.device_loop.graph_driver import GraphDriver
from tide_runtime.device_loop.host_driver import HostDriver
from tide_runtime.errors import DeviceMemoryError, ParamsError

FIRST = [5, 6, 7, 8, 9, 10, 3, 4, 11, 12, 13, 14, 17, 17, 2, 40, 41, 42, 43, 44]
PARAMS = GenerationParams(max_new_tokens=20, ignore_eos=True)


def chat(engine: Engine, **params: Any) -> tuple[list[int], list[int], float]:
    """Two turns: the tokens of both answers, and the share of the second turn's tokens that are computed again, in per cent."""
    [first] = engine.generate([FIRST], replace(PARAMS, **params))
    history = [*FIRST, *first.token_ids]
    [second] = engine.generate([[*history, 50, 51]], replace(PARAMS, max_new_tokens=10, **params))
    again = len(history) - 1 - second.stats.prefix_tokens  # the last token of an answer has not been computed
    return list(first.token_ids), list(second.token_ids), 100 * again / (len(history) + 2)


def loaded(bundle: Path, driven: bool, **options: Any) -> Engine:
    """An engine on target torch; ``driven``: on the simulated GPU, with the loop on the device."""
    made = EngineOptions(target="torch", device="cpu", policy="full", threads=ThreadOptions(1), max_batch=2, **options)
    if not driven:
        return Engine.load(bundle, made)
    gpu = SimulatedGpu()
    backend = TorchBackend(Bundle.open(bundle), "torch", SimulatedStream(gpu))
    backend.min_slots = 16
    drivers = Drivers(HostDriver(gpu).compile, GraphDriver(gpu).compile)
    policy: Any = DeviceLoopPolicy(FullDepth().device_plan(), NumpyLoopKernels(gpu), 5, drivers, 4)
    return Engine(Bundle.open(bundle), made, backend=backend, policy=policy)


@pytest.mark.parametrize("driven", [False, True])
def test_a_second_turn_computes_its_own_tokens_only(bundle: Path, driven: bool) -> None:
    """Guards against chats on GPUs that compute their whole history in every turn, and against texts that change with what is
    kept."""
    with loaded(bundle, driven) as engine:
        alone, kept = chat(engine, use_prefix_cache=False), chat(engine)
        assert kept[:2] == alone[:2] and alone[2] > 90
        print(f"RESULT prefix_recomputed_pct={kept[2]:.1f}")
        assert kept[2] <= 3


def test_prefixes_share_a_budget_with_the_rows(bundle: Path) -> None:
    """Guards against a prefix cache that takes more of a device than it was given, and against texts that depend on it."""
    with loaded(bundle, False) as engine:
        wanted, block = chat(engine), BLOCK_TOKENS * engine.backend.kv_bytes_per_token
    with loaded(bundle, False, kv_memory=8 * block) as engine:  # two rows of 64 tokens
        for salt in "abc":
            assert chat(engine, cache_salt=salt)[:2] == wanted[:2]
            assert 0 < engine.stats().prefix_bytes <= 4 * block


def test_a_device_without_memory_for_prefixes_keeps_none(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a request that fails because its prefix cannot be kept."""
    with loaded(bundle, False) as engine:
        wanted = chat(engine)

    def full(*_: object) -> None:
        raise DeviceMemoryError("the GPU has no 1 MiB left")

    monkeypatch.setattr(TorchPrefixBlocks, "save", full)
    with loaded(bundle, False) as engine:
        with pytest.warns(RuntimeWarning, match="no 1 MiB left; no prefixes are kept"):
            assert chat(engine)[:2] == wanted[:2]
        assert engine.stats().prefix_bytes == 0


def test_prefixes_on_disk_are_refused(bundle: Path, tmp_path: Path) -> None:
    """Guards against a folder that stays empty without a word."""
    with pytest.raises(ParamsError, match="policy full on target torch writes no prefixes"):
        loaded(bundle, False, prefix_dir=str(tmp_path))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("shapes", [MIXED, UNPAGED, WITH_PAIRS], ids=["mixed", "unpaged", "pairs"])
def test_loaded_blocks_are_the_saved_ones(shapes: Any, dtype: str) -> None:
    """Guards against another text's keys and values in a prefix hit: scattered ids, saved from the middle of a row, in slots that
    have grown since."""
    gpu, kind = SimulatedGpu(), ELEMENT_TYPES[dtype]
    caches = DeviceCaches(gpu, shapes, kind, 3, min_slots=20, of_draft_head=True)
    context: Any = type("Context", (), {"caches": caches, "ends": RowEnds(3, caches.limit)})
    context.backend = type("Backend", (), {"manifest": shapes, "cache_element": kind})
    blocks, rng = TorchPrefixBlocks(SimulatedStream(gpu), context, 9), np.random.default_rng(0)
    caches.reserve(40, 3)

    def row(name: str, number: int) -> np.ndarray:
        _, heads, slots, dim = caches.shapes[name]
        shape = heads, slots, dim * kind.bytes
        return blocks._stream.memory(caches.pointer(name, number), int(np.prod(shape))).numpy().reshape(shape)

    for name in caches.shapes:
        for number in range(3):
            row(name, number)[...] = rng.integers(0, 256, row(name, number).shape)
    before = {name: [row(name, number).copy() for number in range(3)] for name in caches.shapes}
    blocks.save(2, 0, [7])
    blocks.save(2, 1, [1])
    caches.reserve(caches.limit, 3)
    blocks.load([7, 1], 0)
    of_head = {f"{part}_cache_{layer}" for part in ("key", "value") for layer in shapes.caches.keys() - shapes.kv.keys()}
    for name in caches.shapes:
        end = 2 * BLOCK_TOKENS - (name in of_head)
        np.testing.assert_array_equal(row(name, 0)[:, :end], before[name][2][:, :end])
        np.testing.assert_array_equal(row(name, 0)[:, end : before[name][0].shape[1]], before[name][0][:, end:])
    assert context.ends.ends == [2 * BLOCK_TOKENS, 0, 0]
