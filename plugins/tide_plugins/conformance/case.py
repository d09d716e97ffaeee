"""A case: inputs and outputs of one launch as host arrays, and the check of what came back."""

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
TOLERANCE = {"f32": 1e-5, "f16": 2e-3, "bf16": 1e-2}  # relative, against float64 on the same, already rounded, inputs
UNTOUCHED = 77  # what an output holds before the launch, to see what was left alone


@dataclass(frozen=True)
class Case:
    """What to launch and what to expect.

    Args:
        prepare: the kernel's ``prepare_…`` function.
        tensors: by name, in host memory. Rows may lie apart, which the copy on the device must keep. The same array under two
            names is the same memory. Outputs hold `UNTOUCHED`, or what the kernel updates.
        numbers: the other arguments.
        check: raises AssertionError unless the tensors, copied back, are right.
    """

    prepare: Callable[..., PreparedLaunch]
    tensors: Tensors
    numbers: dict[str, Any]
    check: Callable[[Tensors], None]


@dataclass(frozen=True)
class CaseSpec:
    """A case that is not made yet. ``name`` says all that sets it apart."""

    kernel: str
    name: str
    build: Callable[[], Case]


def rng_for(name: str) -> np.random.Generator:
    """Random numbers that depend on the case's name alone."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def matrix(values: Array, dtype: str, padding: int = 0, offset: int = 0) -> Array:
    """``values`` [rows, columns] rounded to ``dtype``; rows ``padding`` elements apart, the first one ``offset`` from the start.

    The gaps hold NaN: a kernel that reads them shows it.
    """
    rows, columns = values.shape
    if not padding and not offset:
        return np.ascontiguousarray(values.astype(ELEMENTS[dtype]))
    flat = np.full(offset + rows * (columns + padding), np.nan, ELEMENTS[dtype])
    view = flat[offset:].reshape(rows, columns + padding)[:, :columns]
    view[:] = values.astype(ELEMENTS[dtype])
    return view


def untouched(*shape: int, dtype: Any = np.int32) -> Array:
    return np.full(shape, UNTOUCHED, dtype)


def assert_close(name: str, actual: Array, expected: Array, tolerance: float, scale: Array | float = 0.0) -> None:
    """Relative to the expected value, or to ``scale`` where that is larger; NaN only where it is expected."""
    actual, expected = actual.astype(np.float64), np.asarray(expected, np.float64)
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
    """Equal to the last bit."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape, f"{name} has shape {actual.shape}, expected {expected.shape}"
    if not np.array_equal(_comparable(actual), _comparable(expected)):
        raise AssertionError(f"{name} is {actual!r}, expected {expected!r}")


def _comparable(array: Array) -> Array:
    """Floats as their bits: a NaN equals itself and 0 does not equal -0."""
    return np.ascontiguousarray(array).view(np.uint8) if array.dtype.kind in "fV" and array.ndim else array
