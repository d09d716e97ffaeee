"""Interface to a GPU for launches. `cuda_driver` implements it; tests record calls instead."""

from __future__ import annotations

from ctypes import Structure
from typing import Any, Protocol

from tide_plugins.plans import LaunchPlan


class Memory(Protocol):
    """Device memory that is freed when this object is."""

    @property
    def pointer(self) -> int:
        """Device address, 256-byte aligned."""


class Driver(Protocol):
    """One GPU: its ordinal, its compute capability times ten, its multiprocessors."""

    @property
    def device(self) -> int: ...

    @property
    def compute(self) -> int: ...

    @property
    def sm_count(self) -> int: ...

    def load(self, image: bytes, ptx: bool, symbol: str) -> Any:
        """The entry point ``symbol`` of a cubin, or of PTX."""

    def allow_shared(self, entry: Any, shared_bytes: int) -> None:
        """Let ``entry`` use that much dynamic shared memory per block; needed above 48 KiB."""

    def zeros(self, count_bytes: int, stream: int) -> Memory:
        """Memory zeroed before later work on ``stream``."""

    def launch(self, entry: Any, plan: LaunchPlan, params: Structure, stream: int) -> None:
        """Enqueue one launch on ``stream``; ``params`` is passed by value."""
