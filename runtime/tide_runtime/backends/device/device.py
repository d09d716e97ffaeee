"""Interface of a device: memory, and copies on one stream. `cuda_device` implements it for GPUs, tests over host memory."""

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
    """A recorded point in the stream's work, such as a CUDA event."""

    def wait(self) -> None:
        """Block until the work queued before the mark is done."""


class Device(Protocol):
    """One device and its stream. Queued work runs in order; only `synchronize` and `Mark.wait` block.

    ``kind`` and ``ordinal`` identify the device to ONNX Runtime, ``name`` is its model; ``stream`` is a ``cudaStream_t``.
    ``lock`` is re-entrant and has to be held while queueing work: work that another thread queues during a capture would become
    part of the graph.
    """

    kind: str
    ordinal: int
    name: str
    stream: int
    lock: AbstractContextManager[Any]

    @property
    def is_capturing(self) -> bool:
        """Whether queued work becomes part of a CUDA graph; asked by the thread that queues it, which holds the lock."""

    def use(self) -> None:
        """Make this the calling thread's current device."""

    def allocate(self, count_bytes: int) -> Memory:
        """Memory zeroed before all work queued later. Raises TargetError when the device is out of memory."""

    def pinned(self, count_bytes: int) -> NDArray[np.uint8]:
        """Page-locked host memory, which asynchronous copies need."""

    def upload(self, pointer: int, source: NDArray[Any]) -> None:
        """Queue a copy of contiguous ``source``, which must not change until the copy is done."""

    def download(self, target: NDArray[Any], pointer: int) -> None:
        """Queue a copy into contiguous ``target``."""

    def copy(self, target: int, source: int, count_bytes: int) -> None:
        """Queue a copy from device to device."""

    def copy_strided(
        self, target: int, source: int, pitch: int, width: int, height: int, source_pitch: int | None = None
    ) -> None:
        """Queue a 2D copy of ``height`` rows of ``width`` bytes, ``pitch`` bytes apart, or ``source_pitch`` in the source."""

    def mark(self) -> Mark:
        """Record the current end of the stream's work."""

    def synchronize(self) -> None:
        """Block until all queued work is done; raises its errors."""
