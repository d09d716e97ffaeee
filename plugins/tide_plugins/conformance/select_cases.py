"""Cases of exit_select, compared bitwise because it only copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, product
from typing import Any

import numpy as np

from tide_plugins.conformance.case import ELEMENTS, UNTOUCHED, Case, CaseSpec, Tensors, assert_same, matrix, rng_for, untouched
from tide_plugins.launch.exit_select import prepare_exit_select
from tide_plugins.reference.exit_select import Selection, exit_select

_ROWS = (0, 1, 31, 33, 257)
_HIDDEN = (64, 111, 4096, 4097)


@dataclass(frozen=True)
class _SelectCase:
    """``share``: share of the rows that exits. ``only``: the only requested output."""

    dtype: str
    rows: int
    hidden: int
    share: float = 0.5
    in_place: bool = False
    origin: bool = True
    translated: bool = False
    padding: int = 0
    offset: int = 0
    only: str = ""

    @property
    def name(self) -> str:
        kind = "-in_place" * self.in_place + "-origin" * self.origin + "-translated" * self.translated
        rest = f"pad{self.padding}-offset{self.offset}" + (f"-only_{self.only}" if self.only else "")
        return f"{self.dtype}-n{self.rows}-h{self.hidden}-share{self.share}{kind}-{rest}"

    def build(self) -> Case:
        rng = rng_for(self.name)
        exits = rng.random(self.rows) < self.share
        exit_rows, continue_rows = (np.flatnonzero(flags).astype(np.int32) for flags in (exits, ~exits))
        hidden = self._matrix(rng, self.rows)
        states = self._matrix(rng, self.rows) if self.translated else hidden
        places = self.rows + 5
        head_input = self._matrix(rng, places)
        origin = np.sort(rng.permutation(places)[: self.rows]).astype(np.int32) if self.origin else None
        expected = exit_select(hidden.copy(), states.copy(), exit_rows, continue_rows, head_input, origin)
        tensors: Tensors = {
            "hidden": hidden,
            "exit_states": states,
            "exit_rows": np.resize(exit_rows, self.rows) if len(exit_rows) else untouched(self.rows),
            "continue_rows": np.resize(continue_rows, self.rows) if len(continue_rows) else untouched(self.rows),
            "exit_count": np.asarray([len(exit_rows)], np.int32),
            "continue_count": np.asarray([len(continue_rows)], np.int32),
        }
        if self.only != "head_input":
            tensors["continue_hidden"] = hidden if self.in_place else self._matrix(rng, self.rows)
        if self.only != "continue_hidden":
            tensors["head_input"] = head_input
        if origin is not None:
            tensors |= {"origin": origin, "continue_origin": untouched(self.rows)}
        before = {name: tensor.copy() for name, tensor in tensors.items()}
        return Case(prepare_exit_select, tensors, {}, lambda out: self._check(out, before, expected))

    def _matrix(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        values = rng.standard_normal((rows, self.hidden))
        values[rng.random(values.shape) < 0.01] = np.nan
        return matrix(values, self.dtype, self.padding, self.offset)

    def _check(self, out: Tensors, before: Tensors, expected: Selection) -> None:
        count = len(expected.continue_hidden)
        if "continue_hidden" in out:
            assert_same("continue_hidden", out["continue_hidden"][:count], expected.continue_hidden)
            assert_same("rows behind the continuing", out["continue_hidden"][count:], before["continue_hidden"][count:])
        if "head_input" in out:
            assert_same("head_input", out["head_input"], expected.head_input)
        if expected.continue_origin is not None:
            rest = [UNTOUCHED] * (self.rows - count)
            assert_same("continue_origin", out["continue_origin"], [*expected.continue_origin, *rest])
        if not self.in_place:
            assert_same("hidden", out["hidden"], before["hidden"])


def _specs() -> Iterator[_SelectCase]:
    forms: Iterator[dict[str, Any]] = cycle(({}, {"in_place": True}, {"origin": False}, {"translated": True, "in_place": True}))
    layouts = cycle(((0, 0), (8, 0), (3, 1)))
    for (hidden, rows, dtype), form, (padding, offset) in zip(product(_HIDDEN, _ROWS, ELEMENTS), forms, layouts, strict=False):
        yield _SelectCase(dtype, rows, hidden, padding=padding, offset=offset, **form)
    for dtype, share, in_place in product(ELEMENTS, (0.0, 1.0, 0.1), (False, True)):
        yield _SelectCase(dtype, 64, 128, share, in_place)
    for only in ("continue_hidden", "head_input"):
        yield _SelectCase("f16", 33, 128, only=only)
    yield _SelectCase("f16", 2500, 16)  # more rows than blocks
    yield _SelectCase("f16", 2500, 16, in_place=True)


def select_cases() -> Iterator[CaseSpec]:
    for case in _specs():
        yield CaseSpec("exit_select", f"exit_select-{case.name}", case.build)
