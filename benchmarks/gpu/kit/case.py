"""A case of a stage: what it runs on a GPU, and what it prepares where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Figures = dict[str, Any]  # of a case; anything that JSON holds


class NotRun(Exception):
    """A case cannot run on this machine; the reason is its result, and nothing has failed."""


@dataclass(frozen=True)
class KitCase:
    """``execute`` runs it on the GPU, ``prepare`` does the same up to the launch where there is none.

    Args:
        name: identifies the case in the stage's file.
        seconds: what it is expected to take on an H100 (a guess until a run is in docs/results).
        limit: seconds after which it is stopped.
    """

    name: str
    seconds: float
    execute: Callable[[], Figures]
    prepare: Callable[[], Figures]
    limit: float = 120.0


@dataclass(frozen=True)
class Bench:
    """Where a stage runs.

    Args:
        arch: the architecture that a dry run prepares launches for.
        work: a folder for bundles and logs, which outlives the stage's process.
    """

    arch: str
    work: Path
    dry: bool

    @property
    def compute(self) -> int:
        """Ten times the compute capability of ``arch``."""
        return int(self.arch.removeprefix("sm_"))


class StageModule(Protocol):
    """A module of `benchmarks.gpu.kit.stages`."""

    def cases(self, bench: Bench) -> Iterable[KitCase]:
        """The stage's cases, what teaches most first."""
