"""A conformance case: inputs and outputs of one launch as host arrays, and the check of the results."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tide_plugins.launch.prepared_launch import PreparedLaunch

Array = NDArray[Any]
Tensors = dict[str, Array]
ELEMENTS: Mapping[str, Any] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
TOLERANCE = {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2}  # relative to a float64 reference on the same rounded inputs
UNTOUCHED = 77  # initial value of outputs, to detect elements that are not written


@dataclass(frozen=True)
class Case:
    """A launch and its expected results.

    Args:
        prepare: the kernel's ``prepare_…`` function.
        tensors: name → host array. Device copies must preserve row padding, and arrays shared by two names. Outputs hold
            `UNTOUCHED`, or initial values that the kernel updates.
        numbers: other arguments.
        check: raises AssertionError unless the tensors, copied back, are right.
    """

    prepare: Callable[..., PreparedLaunch]
    tensors: Tensors
    numbers: dict[str, Any]
    check: Callable[[Tensors], None]


@dataclass(frozen=True)
class CaseSpec:
    """A case that is built on demand. ``name`` identifies it completely."""

    kernel: str
    name: str
    build: Callable[[], Case]


def rng_for(name: str) -> np.random.Generator:
    """A random generator seeded by the case's name."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def matrix(values: Array, dtype: str) -> Array:
    """``values`` [rows, columns] rounded to ``dtype``."""
    return np.ascontiguousarray(values.astype(ELEMENTS[dtype]))


def untouched(*shape: int, dtype: Any = np.int32) -> Array:
    return np.full(shape, UNTOUCHED, dtype)


def assert_close(name: str, actual: Array, expected: Array, tolerance: float, scale: Array | float = 0.0) -> None:
    """Assert a relative error, of the expected value or of ``scale`` where larger, and NaN only where expected."""
    actual = actual.astype(np.float64)
    expected = np.asarray(expected, np.float64)
    assert np.array_equal(np.isnan(actual), np.isnan(expected)), f"{name}: NaN at other places than expected"
    known = np.isfinite(expected)
    assert np.array_equal(actual[~known], expected[~known], equal_nan=True), f"{name}: infinities differ"
    room = tolerance * np.maximum(np.abs(expected), scale)
    with np.errstate(invalid="ignore"):
        wrong = known & ~(np.abs(actual - expected) <= room)
    if wrong.any():
        place = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{name}{list(place)} is {actual[place]!r}, expected {expected[place]!r} within {tolerance} relative"
        )


def assert_same(name: str, actual: Array, expected: Any) -> None:
    """Assert bitwise equality."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"{name} has shape {actual.shape}, expected {expected.shape}"
    if not np.array_equal(_comparable(actual), _comparable(expected)):
        raise AssertionError(f"{name} is {actual!r}, expected {expected!r}")


def _comparable(array: Array) -> Array:
    """Floats as bits, so that a NaN equals itself and 0 differs from -0."""
    return np.ascontiguousarray(array).view(np.uint8) if array.dtype.kind in "fV" and array.ndim else array
