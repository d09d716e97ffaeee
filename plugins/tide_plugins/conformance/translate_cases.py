"""Cases of exit_translate: sizes, ranks, row lists, destinations, in-place updates, norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

import numpy as np

from tide_plugins.conformance.case import (
    ELEMENTS,
    TOLERANCE,
    Array,
    Case,
    CaseSpec,
    Tensors,
    assert_close,
    assert_same,
    matrix,
    rng_for,
)
from tide_plugins.launch.exit_translate import prepare_exit_translate
from tide_plugins.reference.exit_translate import exit_translate
from tide_plugins.reference.norm import Norm

_ROWS = (0, 1, 9, 33)
_HIDDEN = (64, 111, 4096, 4097)
_EPSILON = 1e-6


@dataclass(frozen=True)
class _TranslateCase:
    """``listed``: number of translated rows, None: all; ``places``: rows have individual destinations instead of packed ones."""

    dtype: str
    rows: int
    hidden: int
    rank: int = 32
    kind: Norm = "rms"
    listed: int | None = None
    places: bool = False
    in_place: bool = False
    padding: int = 0
    offset: int = 0
    broken: bool = False

    @property
    def name(self) -> str:
        kind = f"{self.kind}-listed{self.listed}" + "-places" * self.places + "-in_place" * self.in_place + "-nan" * self.broken
        return f"{self.dtype}-n{self.rows}-h{self.hidden}-k{self.rank}-{kind}-pad{self.padding}-offset{self.offset}"

    def build(self) -> Case:
        rng = rng_for(self.name)
        states = rng.standard_normal((self.rows, self.hidden)) * 2
        if self.broken:
            states[1, 5], states[2, 6] = np.nan, np.inf
        hidden = matrix(states, self.dtype, self.padding, self.offset)
        out = (
            hidden if self.in_place else matrix(np.full((self.rows + 3, self.hidden), 7.0), self.dtype, self.padding, self.offset)
        )
        down = matrix(rng.standard_normal((self.rank, self.hidden)) * self.hidden**-0.5, self.dtype)
        up = matrix(rng.standard_normal((self.hidden, self.rank)) * self.rank**-0.5, self.dtype)
        tensors: Tensors = {"hidden": hidden, "down": down, "up": up, "out": out}
        if self.kind == "layer":
            tensors["down_sum"] = down.astype(np.float64).sum(axis=1).astype(np.float32)
        rows: Array = np.arange(self.rows)
        if self.listed is not None:
            rows = np.sort(rng.permutation(self.rows)[: self.listed])
            tensors["row_list"] = np.resize(rows, self.rows).astype(np.int32) if self.listed else np.zeros(self.rows, np.int32)
            tensors["row_count"] = np.asarray([self.listed], np.int32)
        places: Array = np.arange(len(rows))
        if self.places:
            origin = (np.arange(self.rows) if self.in_place else rng.permutation(self.rows + 3)[: self.rows]).astype(np.int32)
            tensors["origin"], places = origin, origin[rows]
        expected = exit_translate(hidden[rows], down, up, epsilon=_EPSILON, kind=self.kind)
        before = out.copy()
        return Case(
            prepare_exit_translate,
            tensors,
            {"epsilon": _EPSILON},
            lambda back: self._check(back["out"], before, places, expected),
        )

    def _check(self, out: Array, before: Array, places: Array, expected: Array) -> None:
        scale = np.sqrt(np.nanmean(np.where(np.isfinite(expected), expected, np.nan) ** 2)) if expected.size else 0.0
        assert_close("out", out[places], expected, TOLERANCE[self.dtype], scale)
        others = np.setdiff1d(np.arange(len(out)), places)
        assert_same("rows that are not translated", out[others], before[others])


def _specs() -> Iterator[_TranslateCase]:
    forms: Iterator[dict[str, Any]] = cycle(
        ({}, {"kind": "layer"}, {"in_place": True}, {"places": True}, {"places": True, "in_place": True, "listed": 0})
    )
    layouts = cycle(((0, 0), (8, 0), (3, 1)))
    ranks = cycle((32, 128, 5, 64))
    sizes = product(_HIDDEN, _ROWS, ELEMENTS)
    for (hidden, rows, dtype), form, (padding, offset), rank in zip(sizes, forms, layouts, ranks, strict=False):
        if "listed" in form:
            form = form | {"listed": rows // 2}
        yield _TranslateCase(dtype, rows, hidden, rank, padding=padding, offset=offset, **form)
    for dtype in ELEMENTS:
        for listed, places in product((0, 1, 20), (False, True)):
            yield _TranslateCase(dtype, 33, 128, listed=listed, places=places)
        for rank in (1, 7, 127, 128):
            yield _TranslateCase(dtype, 3, 96, rank)
        yield _TranslateCase(dtype, 5, 64, broken=True)


def translate_cases() -> Iterator[CaseSpec]:
    for case in _specs():
        yield CaseSpec("exit_translate", f"exit_translate-{case.name}", case.build)
