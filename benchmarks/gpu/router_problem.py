"""The sizes that the router is timed at, and the bytes that one launch cannot avoid moving."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from tide_plugins.launch.device_array import ITEM_BYTES
from tide_plugins.plans import RouterPlan, plan_exit_router

HIDDEN_SIZES, WIDTH, ROWS, DTYPES = (2048, 4096, 8192), 128, (1, 8, 64), ("f16", "bf16")


@dataclass(frozen=True)
class RouterProblem:
    """``rows`` tokens of ``hidden_size`` through a router of ``width``."""

    dtype: str
    hidden_size: int
    rows: int
    width: int = WIDTH

    @property
    def name(self) -> str:
        return f"{self.dtype}_h{self.hidden_size}_n{self.rows}"

    @property
    def bytes(self) -> int:
        """Every input read once, every output written once: states, float32 weights, scores."""
        weights = 4 * (self.width * self.hidden_size + 2 * self.width + 1)
        return self.rows * self.hidden_size * ITEM_BYTES[self.dtype] + weights + 4 * self.rows

    @property
    def plan(self) -> RouterPlan:
        return plan_exit_router(self.rows, self.hidden_size, self.width)

    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Tensor → dtype and shape, of `prepare_exit_router`."""
        inputs = {"hidden": (self.dtype, (self.rows, self.hidden_size)), "down": ("f32", (self.width, self.hidden_size))}
        weights = {"down_bias": ("f32", (self.width,)), "up": ("f32", (self.width,)), "up_bias": ("f32", (1,))}
        return {**inputs, **weights, "score": ("f32", (self.rows,))}


def problems() -> Iterator[RouterProblem]:
    """A decode step's: one token of each sequence."""
    for dtype, hidden_size, rows in product(DTYPES, HIDDEN_SIZES, ROWS):
        yield RouterProblem(dtype, hidden_size, rows)
