"""Cases of exit_router: sizes and strides, norms, thresholds, ties, non-finite states, rows beyond row_count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, product

import numpy as np

from tide_plugins.conformance.case import (
    ELEMENTS,
    TOLERANCE,
    UNTOUCHED,
    Array,
    Case,
    CaseSpec,
    Tensors,
    assert_close,
    assert_same,
    matrix,
    rng_for,
    untouched,
)
from tide_plugins.launch.exit_router import prepare_exit_router
from tide_plugins.reference.exit_router import Routing, exit_router
from tide_plugins.reference.norm import Norm

_ROWS = (0, 1, 31, 32, 33, 257)
_HIDDEN = (64, 111, 1024, 4096, 4097, 8192)
_EPSILON = 1e-6


@dataclass(frozen=True)
class _RouterCase:
    """``split``: share of the rows that exits; None: use ``threshold``. ``broken``: row → value written into it."""

    dtype: str
    rows: int
    hidden: int
    width: int = 32
    kind: Norm = "rms"
    padding: int = 0
    offset: int = 0
    split: float | None = 0.5
    threshold: float = 0.5
    flat: bool = False  # up is 0: every score is sigmoid(up_bias) = ½ to the last bit
    mean: float = 0.0
    live: int | None = None
    broken: dict[int, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        shape = f"{self.dtype}-n{self.rows}-h{self.hidden}-r{self.width}-{self.kind}"
        split = f"threshold{self.threshold}" if self.split is None else f"split{self.split}"
        rest = f"pad{self.padding}-offset{self.offset}-{split}-mean{self.mean}" + "-flat" * self.flat
        live = "" if self.live is None else f"-live{self.live}"
        return f"{shape}-{rest}{live}" + "".join(f"-{value}at{row}" for row, value in self.broken.items())

    @property
    def live_rows(self) -> int:
        return self.rows if self.live is None else self.live

    def build(self) -> Case:
        rng = rng_for(self.name)
        states = rng.standard_normal((self.rows, self.hidden)) * 2 + self.mean
        for row, value in self.broken.items():
            states[row, rng.integers(self.hidden)] = value
        inputs: Tensors = {
            "hidden": matrix(states, self.dtype, self.padding, self.offset),
            "down": matrix(rng.standard_normal((self.width, self.hidden)) * self.hidden**-0.5, self.dtype),
            "down_bias": rng.standard_normal(self.width).astype(np.float32) / 2,
            "up": rng.standard_normal(self.width).astype(np.float32) * (0 if self.flat else 2 * self.width**-0.5),
            "up_bias": np.zeros(1, np.float32),
        }
        expected = self._reference(inputs, self.threshold)
        threshold = self.threshold if self.split is None else _between(expected.score, self.split)
        expected = self._reference(inputs, threshold)
        if self.kind == "layer":
            inputs["down_sum"] = inputs["down"].astype(np.float64).sum(axis=1).astype(np.float32)
        if self.live is not None:
            inputs["row_count"] = np.asarray([self.live], np.int32)
        numbers = {"threshold": threshold, "epsilon": _EPSILON}
        return Case(prepare_exit_router, inputs | self._outputs(), numbers, lambda out: self._check(out, expected, threshold))

    def _reference(self, inputs: Tensors, threshold: float) -> Routing:
        weights = (inputs[name] for name in ("down", "down_bias", "up", "up_bias"))
        hidden = inputs["hidden"][: self.live_rows]
        return exit_router(hidden, *weights, threshold=threshold, epsilon=_EPSILON, kind=self.kind)

    def _outputs(self) -> Tensors:
        lists = {name: untouched(self.rows) for name in ("exit_rows", "continue_rows")}
        scalars = {name: untouched(1) for name in ("exit_count", "continue_count", "verdict")}
        return {
            "score": untouched(self.rows, dtype=np.float32),
            "exits": untouched(self.rows, dtype=np.uint8),
            **lists,
            **scalars,
        }

    def _check(self, out: Tensors, expected: Routing, threshold: float) -> None:
        live = self.live_rows
        # A relative error of the log-odds; a score near 1 or ½ has a smaller one.
        assert_close("score", out["score"][:live], expected.score, TOLERANCE[self.dtype])
        exits = out["score"][:live] >= np.float32(threshold)
        assert_same("exits", out["exits"][:live], exits.astype(np.uint8))
        clear = ~(np.abs(expected.score - threshold) <= TOLERANCE[self.dtype] * threshold) | self.flat
        assert_same("exits", exits[clear], expected.exits[clear])
        assert_same("verdict", out["verdict"], [0 if exits.all() else 1 if exits.any() else 2])
        for name, rows in (("exit", np.flatnonzero(exits)), ("continue", np.flatnonzero(~exits))):
            assert_same(f"{name}_count", out[f"{name}_count"], [len(rows)])
            assert_same(f"{name}_rows", out[f"{name}_rows"], [*rows, *[UNTOUCHED] * (self.rows - len(rows))])
        assert_same("rows that are not live", out["score"][live:], untouched(self.rows - live, dtype=np.float32))
        assert_same("rows that are not live", out["exits"][live:], untouched(self.rows - live, dtype=np.uint8))


def _between(score: Array, share: float) -> float:
    """A threshold between two scores, which about ``share`` of them reach."""
    known = np.sort(score[np.isfinite(score)])
    place = int(len(known) * (1 - share))
    if not len(known) or place == 0:
        return 0.0
    return float(np.float32((known[place - 1] + (known[place] if place < len(known) else 1.0)) / 2))


def _specs() -> Iterator[_RouterCase]:
    widths, kinds, layouts = cycle((128, 16, 1, 33, 64)), cycle(("rms", "rms", "layer")), cycle(((0, 0), (8, 0), (3, 1)))
    turns = zip(widths, kinds, layouts, strict=False)
    for (hidden, rows, dtype), (width, kind, (padding, offset)) in zip(product(_HIDDEN, _ROWS, ELEMENTS), turns, strict=False):
        wide = rows > 128 and hidden > 2048  # the tiled form of these is slow on the host
        yield _RouterCase(dtype, rows, hidden, min(width, 33) if wide else width, kind, padding, offset)  # type: ignore[arg-type]
    for dtype in ELEMENTS:
        for rows in (1, 33, 257):
            yield _RouterCase(dtype, rows, 256, split=None, threshold=0.0)  # all exit
            yield _RouterCase(dtype, rows, 256, split=None, threshold=1.5)  # none
            yield _RouterCase(dtype, rows, 256, split=None, threshold=float("nan"))
            yield _RouterCase(dtype, rows, 256, split=None, flat=True)  # all tie
            yield _RouterCase(
                dtype, rows, 256, split=None, flat=True, threshold=float(np.nextafter(np.float32(0.5), np.float32(1)))
            )
            yield _RouterCase(dtype, rows, 256, broken={0: float("nan")})
            yield _RouterCase(dtype, rows, 256, broken={rows - 1: float("inf")}, kind="layer")
        yield _RouterCase(dtype, 33, 256, broken={1: float("-inf"), 7: float("nan"), 32: float("inf")}, split=None, threshold=0.0)
        for rows, live in ((33, 0), (33, 1), (33, 16), (64, 33), (300, 0), (300, 129), (300, 299)):
            yield _RouterCase(dtype, rows, 256, live=live)
        for width in (1, 15, 16, 17, 127, 255, 256):
            yield _RouterCase(dtype, 9, 320, width)
            yield _RouterCase(dtype, 130, 320, width, padding=1)
        for hidden in (1, 7, 33):
            yield _RouterCase(dtype, 5, hidden)
            yield _RouterCase(dtype, 129, hidden)
        yield _RouterCase(dtype, 17, 4096, kind="layer", mean=10.0)
        yield _RouterCase(dtype, 129, 1024, kind="layer", mean=10.0)
        for width in (64, 129):  # tiles of 128 rows on every GPU; the partition takes two passes
            yield _RouterCase(dtype, 5000, 72, width, padding=8)
    yield _RouterCase("f32", 3, 64, broken={1: 1e30})  # its square overflows float32, so there is no score
    yield _RouterCase("bf16", 3, 64, broken={1: 1e30})


def router_cases() -> Iterator[CaseSpec]:
    for case in _specs():
        yield CaseSpec("exit_router", f"exit_router-{case.name}", case.build)
