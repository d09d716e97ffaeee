"""What the runtime asks of a device: memory, and copies on one stream. `cuda_device` is a GPU; tests take host memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Memory(Protocol):
    """Device memory that is freed with this object."""

    @property
    def pointer(self) -> int:
        """Device address, 256-byte aligned."""


class Mark(Protocol):
    """A place in the stream's work."""

    def wait(self) -> None:
        """Until all that was queued before it is done."""


class Device(Protocol):
    """One device and its stream. What is queued runs in order; nothing but `synchronize` and `Mark.wait` waits.

    ``kind`` and ``ordinal`` name it to ONNX Runtime; ``stream`` is a ``cudaStream_t``. ``lock``, re-entrant, is held by whoever
    queues something: what another thread queues while one captures the stream would become part of its graph.
    """

    kind: str
    ordinal: int
    stream: int
    lock: AbstractContextManager[Any]

    def use(self) -> None:
        """Make it the calling thread's device."""

    def allocate(self, count_bytes: int) -> Memory:
        """Memory that is zero for everything queued later. Raises TargetError when there is not so much."""

    def pinned(self, count_bytes: int) -> NDArray[np.uint8]:
        """Host memory that copies reach without a detour."""

    def upload(self, pointer: int, source: NDArray[Any]) -> None:
        """Queue a copy of contiguous ``source``, which must keep its values until that is done."""

    def download(self, target: NDArray[Any], pointer: int) -> None:
        """Queue a copy into contiguous ``target``."""

    def copy(self, target: int, source: int, count_bytes: int) -> None:
        """Queue a copy from device to device."""

    def copy_strided(self, target: int, source: int, pitch: int, width: int, height: int) -> None:
        """Queue copies of ``height`` pieces of ``width`` bytes that lie ``pitch`` bytes apart on both sides."""

    def mark(self) -> Mark:
        """Here."""

    def synchronize(self) -> None:
        """Wait for all that is queued; an error of it is raised here."""
