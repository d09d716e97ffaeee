"""The promised figures of the GPU decode benchmark. A missed one is reported and fails nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Promise:
    """``figure`` of the rows that it ``covers`` is at least ``least`` and at most ``most``; ``words``: the same as a sentence."""

    figure: str
    words: str
    least: float = -math.inf
    most: float = math.inf
    covers: Callable[[Row], bool] = lambda row: True

    def kept(self, row: Row) -> bool | None:
        """None: an arm that it needs could not run."""
        return self.least <= row[self.figure] <= self.most if self.figure in row else None


PROMISES = (
    Promise("over_unsplit", "segments take at most 1.03 times the unsplit graph's time", most=1.03),
    Promise("vs_eager", "at batch 1 TIDE is at least twice as fast as HF eager", least=2.0, covers=lambda row: row["batch"] == 1),
    Promise(
        "as_eager",
        "the demo model generates HF eager's tokens in fp32",
        least=1.0,
        covers=lambda row: (row["model"], row["dtype"]) == ("demo", "fp32"),
    ),
)


def verdicts(row: Row) -> dict[str, bool]:
    """Figure → whether ``row`` keeps its promise; figures that ``row`` lacks are left out."""
    return {p.figure: kept for p in PROMISES if p.covers(row) and (kept := p.kept(row)) is not None}


def complaints(row: Row) -> list[str]:
    """A sentence for each promise that ``row`` misses, or that could not be checked."""
    judged = {p: p.kept(row) for p in PROMISES if p.covers(row)}
    missed = [f"missed: {p.words}; it is {row[p.figure]:.3f}" for p, kept in judged.items() if kept is False]
    return missed + [f"not checked: {p.words}" for p, kept in judged.items() if kept is None]
