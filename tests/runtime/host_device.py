"""A `Device` whose memory is this process's: the GPU backends' own code runs on it, copies happen when they would be queued.

What a GPU would do later is checked where it can be: a copy that begins or ends outside an allocation fails, and so does one from
pinned memory that the host has changed since it was queued and before anybody waited. Reserved addresses without memory hold NaN,
which graphs that read them compute with, and which has to be there still when they get memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from threading import RLock
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from tide_runtime.backends.device.staging_ring import StagingRing
from tide_runtime.errors import DeviceMemoryError


class HostMemory:
    def __init__(self, count_bytes: int) -> None:
        self._bytes = np.zeros(count_bytes + 256, np.uint8)
        self.pointer = self._bytes.ctypes.data + -self._bytes.ctypes.data % 256
        self.end = self.pointer + count_bytes

    def holds(self, pointer: int, count_bytes: int) -> bool:
        return self.pointer <= pointer and pointer + count_bytes <= self.end


class HostReserved(HostMemory):
    """Addresses that get memory by granules."""

    granule = 64

    def __init__(self, device: HostDevice, count_bytes: int) -> None:
        super().__init__(-(-count_bytes // self.granule) * self.granule)
        self._device, first = device, self.pointer - self._bytes.ctypes.data
        self._granules = self._bytes[first : first + self.end - self.pointer].reshape(-1, self.granule)
        self._granules[:] = 0xFF
        self._has_memory = np.zeros(len(self._granules), bool)

    @property
    def provided(self) -> int:
        return self.granule * int(self._has_memory.sum())

    def provide(self, ranges: Iterable[tuple[int, int]]) -> None:
        assert not self._device.is_capturing, "memory is provided within a capture"
        wanted = np.zeros_like(self._has_memory)
        for begin, end in ranges:
            assert begin >= 0 and end <= self.end - self.pointer
            wanted[begin // self.granule : -(-end // self.granule)] = True
        missing = wanted & ~self._has_memory
        most = self._device.max_reserved
        if most is not None and self._device.reserved + self.granule * int(missing.sum()) > most:
            raise DeviceMemoryError("the device has no memory left")
        assert (self._granules[missing] == 0xFF).all(), "addresses without memory were written"
        self._granules[missing] = 0
        self._has_memory |= missing

    def holds(self, pointer: int, count_bytes: int) -> bool:
        first, end = pointer - self.pointer, pointer - self.pointer + count_bytes
        inside = super().holds(pointer, count_bytes)
        return inside and bool(self._has_memory[first // self.granule : -(-end // self.granule)].all())


class HostMark:
    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


class HostDevice:
    """Copies are queued and made when somebody waits, or when the queue is needed: by `flush` before a graph runs.

    ``max_reserved``: bytes that reserved addresses can get in all; None: any.
    """

    kind, ordinal, stream, name, compute = "cpu", 0, 7, "host memory", 90
    is_capturing, max_reserved = False, cast(int | None, None)

    @property
    def reserved(self) -> int:
        """Bytes of memory that reserved addresses have."""
        return sum(memory.provided for memory in self._memory if isinstance(memory, HostReserved))

    def __init__(self) -> None:
        self.downloads: list[int] = []  # bytes of each copy to the host
        self.uploads: list[int] = []
        self.waits = 0
        self.lock: AbstractContextManager[Any] = RLock()
        self._memory: list[HostMemory] = []
        self._staging = StagingRing()
        self._queue: list[tuple[NDArray[Any], bytes, int]] = []  # uploads: the source, what it held, where it goes

    def use(self) -> None:
        pass

    def allocate(self, count_bytes: int) -> HostMemory:
        memory = HostMemory(count_bytes)
        self._memory.append(memory)
        return memory

    def reserve(self, count_bytes: int) -> HostReserved:
        memory = HostReserved(self, count_bytes)
        self._memory.append(memory)
        return memory

    def free_memory(self) -> None:
        pass

    def zero(self, pointer: int, count_bytes: int) -> None:
        self._check(pointer, count_bytes)
        ctypes.memset(pointer, 0, count_bytes)

    def pinned(self, count_bytes: int) -> NDArray[np.uint8]:
        return np.zeros(count_bytes, np.uint8)

    def upload(self, pointer: int, source: NDArray[Any]) -> None:
        self._check(pointer, source.nbytes)
        assert source.flags.c_contiguous
        self.uploads.append(source.nbytes)
        ctypes.memmove(pointer, source.ctypes.data, source.nbytes)
        self._queue.append((source, source.tobytes(), pointer))

    def upload_copy(self, pointer: int, source: NDArray[Any]) -> None:
        self._staging.upload(self, pointer, source)

    def download(self, target: NDArray[Any], pointer: int) -> None:
        self._check(pointer, target.nbytes)
        assert target.flags.c_contiguous
        self.downloads.append(target.nbytes)
        ctypes.memmove(target.ctypes.data, pointer, target.nbytes)

    def copy(self, target: int, source: int, count_bytes: int) -> None:
        self._check(target, count_bytes)
        self._check(source, count_bytes)
        ctypes.memmove(target, source, count_bytes)

    def copy_strided(
        self, target: int, source: int, pitch: int, width: int, height: int, source_pitch: int | None = None
    ) -> None:
        """Rows are copied in any order, so the two sides must not overlap."""
        step = source_pitch or pitch
        ends = [(target, target + (height - 1) * pitch + width), (source, source + (height - 1) * step + width)]
        assert source_pitch is None or max(first for first, _ in ends) >= min(end for _, end in ends), (
            "a copy overlaps its source"
        )
        for row in reversed(range(height)):
            self.copy(target + row * pitch, source + row * step, width)

    def mark(self) -> HostMark:
        return HostMark(self._wait)

    def synchronize(self) -> None:
        self._wait()

    def _wait(self) -> None:
        self.waits += 1
        for source, held, _ in self._queue:
            assert source.tobytes() == held, "the host changed pinned memory whose copy was still queued"
        self._queue.clear()

    def _check(self, pointer: int, count_bytes: int) -> None:
        inside = any(memory.holds(pointer, count_bytes) for memory in self._memory)
        assert inside, f"{count_bytes} bytes at {pointer:#x} are not inside one allocation"
