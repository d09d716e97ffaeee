"""Caches on a device: rows get memory when they are used, and grow without losing a key."""

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from runtime.host_device import HostDevice
from runtime.numpy_backend import tiny_manifest
from runtime.test_engine import PROMPTS, params, tokens
from runtime.tiny_transformer import TinyTransformer
from tide_runtime import Engine, EngineOptions
from tide_runtime.backends.device.device_caches import DeviceCaches
from tide_runtime.backends.device.element_types import FP32, INT8, ElementType
from tide_runtime.bundle.engine_info import ProfileInfo
from tide_runtime.bundle.manifest import KVInfo, LayerInfo, Manifest
from tide_runtime.errors import CacheFullError, DeviceMemoryError


def manifest(heads: int, limit: int) -> Manifest:
    made = tiny_manifest(TinyTransformer(3, (0.5, 0.5), 5, limit), [1])
    object.__setattr__(made, "layers", [LayerInfo(KVInfo(heads, 2, 4))] * 2)
    return made


def view(caches: DeviceCaches, name: str, element: ElementType = FP32) -> NDArray[Any]:
    """The cache as graphs see it."""
    shape = caches.shapes[name]
    memory = (ctypes.c_uint8 * (int(np.prod(shape)) * element.bytes)).from_address(caches.pointer(name, 0))
    return np.ctypeslib.as_array(memory).view(element.host).reshape(shape)


@pytest.mark.parametrize(("rows", "heads"), [(1, 1), (1, 3), (3, 2), (5, 1), (4, 8), (7, 3)])
@pytest.mark.parametrize("limit", [64, 37, 8])
def test_growth_keeps_every_key_and_value(rows: int, heads: int, limit: int) -> None:
    """Guards against copies that overwrite each other, or leave a sequence's keys behind."""
    caches, random = DeviceCaches(HostDevice(), manifest(heads, limit), FP32, rows, min_slots=4), np.random.default_rng(0)
    caches.reserve(1, rows)
    held: dict[str, NDArray[np.float32]] = {
        name: np.zeros((*shape[:2], 0, shape[3]), np.float32) for name, shape in caches.shapes.items()
    }
    sizes = [caches.slots]
    while True:
        for name in held:
            assert np.array_equal(view(caches, name)[:, :, : held[name].shape[2]], held[name])
            held[name] = random.random(caches.shapes[name], np.float32)
            view(caches, name)[:] = held[name]
        if caches.slots == limit:
            break
        caches.reserve(caches.slots + 1)
        sizes.append(caches.slots)
    assert sizes == sorted(sizes) and len(set(sizes)) == len(sizes) and 4 <= sizes[0] < 8
    with pytest.raises(CacheFullError):
        caches.reserve(limit + 1)


def test_engines_keep_all_slots() -> None:
    """Guards against caches that grow under engines, which are built for a fixed number of slots."""
    caches = DeviceCaches(HostDevice(), manifest(2, 64), FP32, 2)
    caches.shrink()
    assert caches.slots == 64


def test_rows_get_memory_when_they_are_used() -> None:
    """Guards against an engine that takes the memory of max_batch rows of full length for one short text."""
    caches = DeviceCaches(HostDevice(), manifest(2, 64), FP32, 16, min_slots=16)
    row = 2 * 2 * 16 * (2 + 4) * FP32.bytes  # two layers of two heads; keys have two numbers, values four
    assert caches._memory.provided == 0
    caches.reserve(16, 1)
    first, addresses = caches._memory.provided, [caches.pointer(name, 0) for name in caches.shapes]
    assert 0 < first <= row
    caches.reserve(5, 3)
    assert 2 * first < caches._memory.provided <= 3 * row
    caches.reserve(64, 2)
    assert caches.rows == 3 and 9 * first < caches._memory.provided <= 12 * row
    assert addresses == [caches.pointer(name, 0) for name in caches.shapes]


@pytest.mark.parametrize("element", [FP32, INT8], ids=str)
def test_growth_moves_the_rows_in_use_only(element: ElementType) -> None:
    """Guards against reading rows that have no memory, which ends the process on a GPU."""
    caches = DeviceCaches(HostDevice(), manifest(2, 64), element, 16, min_slots=16)
    unused = view(caches, "key_cache_1", element)[5, 0, 0, 0]
    caches.reserve(16, 2)
    for name in caches.shapes:
        view(caches, name, element)[:2] = 3
    caches.move_row(1, 4, 16)
    caches.reserve(33)
    for name in caches.shapes:
        held = view(caches, name, element)
        assert caches.slots == 64 and (held[[0, 1, 4], :, :16] == 3).all()
        np.testing.assert_array_equal(held[5:], unused)
    caches.clear_row(4)
    caches.clear_row(9)
    for name in caches.shapes:
        held = view(caches, name, element)
        assert (held[4] == 0).all() and (held[1, :, :16] == 3).all()
        np.testing.assert_array_equal(held[9], unused)


def test_memory_that_is_short_leaves_the_caches_as_they_were() -> None:
    """Guards against steps that read keys and values elsewhere after a request that did not fit."""
    device = HostDevice()
    caches = DeviceCaches(device, manifest(2, 64), FP32, 4, min_slots=16)
    caches.reserve(16, 1)
    view(caches, "key_cache_1")[0] = 3
    device.max_reserved = 3 * caches._memory.provided
    with pytest.raises(DeviceMemoryError):
        caches.reserve(64, 4)
    assert caches.slots == 16 and caches.rows == 1 and (view(caches, "key_cache_1")[0] == 3).all()
    device.max_reserved = None
    caches.reserve(64, 4)
    assert caches.slots == 64 and caches.rows == 4


def test_the_batch_size_is_limited_to_that_of_the_engines(engine: Engine) -> None:
    """Guards against steps without an optimization profile, which would fail all 16 prompts of a service."""
    target = replace(engine.manifest.targets["cpu"], profiles=[ProfileInfo("decode", [1, 1, 2], [1, 1, 1])])
    bundle = replace(engine.bundle, manifest=replace(engine.manifest, targets={"cpu": target}))
    alone = [tokens(engine.generate(prompt, params())[0]) for prompt in PROMPTS]
    with Engine(bundle, EngineOptions(policy="full")) as narrow:
        assert [tokens(r) for r in narrow.generate(PROMPTS, params())] == alone
        assert narrow.max_batch == 2
