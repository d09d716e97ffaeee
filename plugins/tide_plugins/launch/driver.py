"""Interface to a GPU for launches. `cuda_driver` implements it; tests record calls instead."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from typing import Any, Protocol

from tide_plugins.plans import LaunchPlan


class Memory(Protocol):
    """Device memory that is freed when this object is."""

    @property
    def pointer(self) -> int:
        """Device address, 256-byte aligned."""


class Driver(Protocol):
    """One GPU: its ordinal, its compute capability times ten."""

    @property
    def device(self) -> int: ...

    @property
    def compute(self) -> int: ...

    def load(self, image: bytes, ptx: bool, symbol: str) -> Any:
        """The entry point ``symbol`` of a cubin, or of PTX."""

    def zeros(self, count_bytes: int, stream: int) -> Memory:
        """Memory zeroed before later work on ``stream``."""

    def launch(self, entry: Any, plan: LaunchPlan, params: Structure, stream: int, arguments: Sequence[str] = ()) -> None:
        """Enqueue one launch on ``stream``, with the fields ``arguments`` of ``params`` one by one, or ``params`` by value."""
