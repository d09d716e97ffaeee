"""Device memory that is provided by need, at addresses that never change: an address range, into which memory is mapped.

Steps and captured graphs are bound to addresses, so caches that grow must not move. The driver has virtual memory for this
(cuMemAddressReserve, cuMemCreate, cuMemMap, cuMemSetAccess); to keep keys and values there is the idea of vAttention (Prabhu et
al. 2024, arXiv:2405.04437). Memory comes in granules, 2 MiB on today's GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from tide_runtime.backends.device.deferred_frees import DeferredFrees
from tide_runtime.errors import TargetError


class AddressRange:
    """At least ``count_bytes`` of addresses on GPU ``ordinal``, whose context is current; the first granule has memory.

    Args:
        api: the module cuda.bindings.driver.
        check: returns the value of a call's result, or raises TargetError, DeviceMemoryError when memory is short.
        stream: handle of the stream that uses the memory; new memory is zeroed there.

    Attributes:
        pointer: address of the first byte.
        provided: bytes that have memory.

    Raises what ``check`` raises, where the GPU or its driver does not map memory, or has none left.
    """

    def __init__(
        self, api: Any, check: Callable[[str, tuple[Any, ...]], Any], ordinal: int, stream: int, count_bytes: int
    ) -> None:
        self._api = api
        self._check = check
        self._stream = stream
        device = check("cuDeviceGet", api.cuDeviceGet(ordinal))
        supported = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not check("cuDeviceGetAttribute", api.cuDeviceGetAttribute(supported, device)):
            raise TargetError(f"GPU {ordinal} has no virtual memory management")
        self._properties, self._access = _device_memory(api, ordinal)
        recommended = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        granularity = api.cuMemGetAllocationGranularity(self._properties, recommended)
        self.granule = int(check("cuMemGetAllocationGranularity", granularity))
        self._has_memory = bytearray(max(1, -(-count_bytes // self.granule)))  # of each granule
        self._bytes = len(self._has_memory) * self.granule
        self._mappings: list[tuple[int, int]] = []  # first granule and number of them
        self._context = check("cuCtxGetCurrent", api.cuCtxGetCurrent())
        self.provided = 0
        self.pointer = int(check("cuMemAddressReserve", api.cuMemAddressReserve(self._bytes, 0, 0, 0)))
        try:
            self.provide([(0, 1)])  # a driver may reserve addresses and refuse to map: that has to be found here
        except TargetError:
            self.close()
            raise

    def provide(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Map memory for the bytes in ``ranges``, each [begin, end), that have none, zeroed before all work queued later.

        Raises as the constructor does; no more bytes have memory then than before.
        """
        before = len(self._mappings)
        try:
            for begin, end in ranges:
                assert begin >= 0 and end <= self._bytes
                for first, count in self._missing(begin // self.granule, -(-end // self.granule)):
                    self._map(first, count)
        except TargetError:
            self._unmap(before)
            raise

    def close(self) -> None:
        """Give memory and addresses back, after all work that is queued. Any thread may call, whatever its current context is.

        Errors are not raised: a process that ends may have lost its driver.
        """
        api, check = self._api, self._check
        with suppress(TargetError):
            check("cuCtxPushCurrent", api.cuCtxPushCurrent(self._context))
            try:
                self._unmap(0)
                check("cuMemAddressFree", api.cuMemAddressFree(self.pointer, self._bytes))
            finally:
                api.cuCtxPopCurrent()

    def _missing(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """First granule and length of each run of granules in [``first``, ``end``) that have no memory."""
        while (start := self._has_memory.find(0, first, end)) >= 0:
            found = self._has_memory.find(1, start, end)
            first = found if found >= 0 else end
            yield start, first - start

    def _map(self, first: int, count: int) -> None:
        api, check = self._api, self._check
        address, size = self.pointer + first * self.granule, count * self.granule
        handle = check("cuMemCreate", api.cuMemCreate(size, self._properties, 0))
        try:
            check("cuMemMap", api.cuMemMap(address, size, 0, handle, 0))
            self._mappings.append((first, count))
            self._has_memory[first : first + count] = b"\1" * count
            self.provided += size
        finally:
            check("cuMemRelease", api.cuMemRelease(handle))  # a mapping keeps its memory
        check("cuMemSetAccess", api.cuMemSetAccess(address, size, [self._access], 1))
        check("cuMemsetD8Async", api.cuMemsetD8Async(address, 0, size, self._stream))

    def _unmap(self, kept: int) -> None:
        """Unmap all but the first ``kept`` mappings."""
        api, check = self._api, self._check
        check("cuStreamSynchronize", api.cuStreamSynchronize(self._stream))  # unmapping, unlike a free, does not wait
        while len(self._mappings) > kept:
            first, count = self._mappings.pop()
            check("cuMemUnmap", api.cuMemUnmap(self.pointer + first * self.granule, count * self.granule))
            self._has_memory[first : first + count] = bytes(count)
            self.provided -= count * self.granule


def _device_memory(api: Any, ordinal: int) -> tuple[Any, Any]:
    """Properties of memory on GPU ``ordinal``, and the access of that GPU's kernels and copies to it."""
    properties = api.CUmemAllocationProp()
    access = api.CUmemAccessDesc()
    properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    for location in (properties.location, access.location):
        location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = ordinal
    access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return properties, access


class MappedMemory:
    """The `ReservedMemory` of a GPU: ``addresses``, which are handed to ``frees`` when this object is deleted.

    ``lock``: of the stream, see `Device`.
    """

    def __init__(self, addresses: AddressRange, lock: Any, frees: DeferredFrees) -> None:
        self._addresses = addresses
        self._lock = lock
        self._frees = frees
        self.pointer = addresses.pointer

    @property
    def provided(self) -> int:
        return self._addresses.provided

    def provide(self, ranges: Iterable[tuple[int, int]]) -> None:
        with self._lock:
            assert not self._frees.capturing, "every launch of the graph would zero the memory again"
            self._addresses.provide(ranges)

    def __del__(self) -> None:
        self._frees.drop(self._addresses)


class WholeMemory:
    """A `ReservedMemory` of ``count_bytes`` whose ``memory`` was allocated whole, where a device does not map any."""

    def __init__(self, memory: Any, count_bytes: int) -> None:
        self._memory = memory
        self.pointer = memory.pointer
        self.provided = count_bytes

    def provide(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Do nothing: all bytes have memory."""
