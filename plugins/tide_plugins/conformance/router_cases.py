"""Cases of exit_router: sizes that fill no lane, chunk, slice or group; every width; non-finite and overflowing states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, product

import numpy as np

from tide_plugins.conformance.case import (
    ELEMENTS,
    TOLERANCE,
    Case,
    CaseSpec,
    Tensors,
    assert_close,
    matrix,
    rng_for,
    untouched,
)
from tide_plugins.launch.exit_router_launch import prepare_exit_router
from tide_plugins.reference.numpy_exit_router import exit_router

_ROWS = (0, 1, 7, 8, 9, 33)
_HIDDEN = (64, 111, 1024, 4096, 4097, 8192)
_EPSILON = 1e-6


@dataclass(frozen=True)
class _RouterCase:
    """``broken``: row → value written into it."""

    dtype: str
    rows: int
    hidden: int
    width: int = 32
    broken: dict[int, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        broken = "".join(f"-{value}at{row}" for row, value in self.broken.items())
        return f"exit_router-{self.dtype}-n{self.rows}-h{self.hidden}-r{self.width}{broken}"

    def build(self) -> Case:
        rng = rng_for(self.name)
        states = rng.standard_normal((self.rows, self.hidden)) * 2
        for row, value in self.broken.items():
            states[row, rng.integers(self.hidden)] = value
        weights: Tensors = {
            "down": (rng.standard_normal((self.width, self.hidden)) * self.hidden**-0.5).astype(np.float32),
            "down_bias": rng.standard_normal(self.width).astype(np.float32) / 2,
            "up": rng.standard_normal(self.width).astype(np.float32) * 2 * np.float32(self.width**-0.5),
            "up_bias": np.full(1, 0.25, np.float32),
        }
        hidden = matrix(states, self.dtype)
        expected = exit_router(hidden, *weights.values(), epsilon=_EPSILON)
        tensors = {"hidden": hidden, **weights, "score": untouched(self.rows, dtype=np.float32)}
        # The states are the same numbers on both sides, and all sums are of float32, whatever the states' type.
        return Case(
            prepare_exit_router,
            tensors,
            {"epsilon": _EPSILON},
            lambda out: assert_close("score", out["score"], expected, TOLERANCE["f32"]),
        )


def _specs() -> Iterator[_RouterCase]:
    widths = cycle((128, 16, 1, 33, 64))
    for hidden, rows, dtype in product(_HIDDEN, _ROWS, ELEMENTS):
        yield _RouterCase(dtype, rows, hidden, next(widths))
    for dtype in ELEMENTS:
        for width in (1, 15, 16, 17, 127, 255, 256):
            yield _RouterCase(dtype, 9, 320, width)
        for hidden in (1, 7, 33, 8200, 16_500):  # from 8,193 on chunks are longer
            yield _RouterCase(dtype, 5, hidden)
        yield _RouterCase(dtype, 9, 256, broken={1: float("-inf"), 7: float("nan"), 8: float("inf")})
    yield _RouterCase("f32", 3, 64, broken={1: 1e30})  # its square overflows float32, so there is no score
    yield _RouterCase("bf16", 3, 64, broken={1: 1e30})


def router_cases() -> Iterator[CaseSpec]:
    for case in _specs():
        yield CaseSpec("exit_router", case.name, case.build)
