"""Interface of a device: memory, and copies on one stream. `cuda_device` implements it for GPUs, tests over host memory."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Memory(Protocol):
    """Device memory that is freed with this object."""

    @property
    def pointer(self) -> int:
        """Device address, 256-byte aligned."""


class ReservedMemory(Memory, Protocol):
    """Device addresses that are freed with this object, and get their memory by need. They never change."""

    @property
    def provided(self) -> int:
        """Bytes that have memory."""

    def provide(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Give the bytes in ``ranges``, each [begin, end), memory where they have none, zeroed before all work queued later; not
        in a capture.

        Raises DeviceMemoryError when the device is out of memory; the addresses then have what they had.
        """


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

    def reserve(self, count_bytes: int) -> ReservedMemory:
        """Addresses whose memory is provided by need; all at once, with a warning, on devices that have no virtual memory."""

    def free_memory(self) -> int | None:
        """Bytes that can still be allocated; None: not known."""

    def zero(self, pointer: int, count_bytes: int) -> None:
        """Queue zeros for ``count_bytes`` from ``pointer`` on."""

    def pinned(self, count_bytes: int) -> NDArray[np.uint8]:
        """Page-locked host memory, which asynchronous copies need."""

    def upload(self, pointer: int, source: NDArray[Any]) -> None:
        """Queue a copy of contiguous ``source``, which must not change until the copy is done."""

    def upload_copy(self, pointer: int, source: NDArray[Any]) -> None:
        """Queue a copy of ``source``, which may change when this returns, through kept pinned memory; not in a capture."""

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
