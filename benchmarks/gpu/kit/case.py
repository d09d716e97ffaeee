"""A case of a stage, and where it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, Any]  # of a case; anything that JSON holds


class NotRun(Exception):
    """A case cannot run on this machine; the reason is its result, and nothing has failed."""


@dataclass(frozen=True)
class KitCase:
    """``execute`` runs it on the GPU; ``prepare`` does the same up to the launch where there is none."""

    name: str
    execute: Callable[[], Figures]
    prepare: Callable[[], Figures]


@dataclass(frozen=True)
class Bench:
    """Where a stage runs.

    Args:
        arch: the architecture that a dry run prepares launches for.
        work: a folder for bundles and logs, which outlives the stage's process.
        carried: the folder of bundles that came along.
    """

    arch: str
    work: Path
    carried: Path
    dry: bool

    @property
    def compute(self) -> int:
        """Ten times the compute capability of ``arch``."""
        return int(self.arch.removeprefix("sm_"))

    @property
    def device(self) -> str:
        """torch's."""
        return "cpu" if self.dry else "cuda"
