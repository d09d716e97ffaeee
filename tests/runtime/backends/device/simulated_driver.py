"""The driver's virtual memory over no memory at all, with the rules that its documentation states, and cuda.bindings' types."""

from typing import Any

from cuda.bindings import driver

GRANULE = 2 << 20
OK, INVALID = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_VALUE
FULL, REFUSED = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, driver.CUresult.CUDA_ERROR_NOT_SUPPORTED


class SimulatedDriver:
    """``free``: granules of memory. ``refuses``: a call that this driver does not support. ``done``: the calls that worked."""

    def __init__(self, free: int = 1000, refuses: str = "") -> None:
        self.free, self._refuses = free, refuses
        self.done: list[str] = []
        self.reserved: dict[int, int] = {}
        self.handles: dict[int, int] = {}  # handle → bytes
        self.mapped: dict[int, tuple[int, bool]] = {}  # address → bytes, and whether kernels may touch them
        self.zeroed: list[tuple[int, int]] = []
        self.contexts, self._next = ["main"], 5 * GRANULE

    def __getattr__(self, name: str) -> Any:
        return getattr(driver, name)  # types

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        return OK, driver.CUdevice(ordinal)

    def cuDeviceGetAttribute(self, attribute: Any, device: Any) -> tuple[Any, ...]:
        mapping = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        assert int(device) == 1 and attribute == mapping
        return OK, int(self._refuses != "attribute")

    def cuDeviceGetMemPool(self, device: Any) -> tuple[Any, ...]:
        return REFUSED, None

    def cuGetErrorString(self, error: Any) -> tuple[Any, ...]:
        return OK, b"in words"

    def cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> tuple[Any, ...]:
        self._check_location(properties)
        return OK, GRANULE

    def cuCtxGetCurrent(self) -> tuple[Any, ...]:
        return OK, self.contexts[-1]

    def cuCtxPushCurrent(self, context: str) -> tuple[Any, ...]:
        self.contexts.append(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        return OK, self.contexts.pop()

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        assert self.contexts[-1] == "main"
        return self._did("cuStreamSynchronize")

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
        if size <= 0 or size % GRANULE or alignment or address or flags:
            return INVALID, None
        if self._refuses == "cuMemAddressReserve":
            return REFUSED, None
        self._next += size + GRANULE
        self.reserved[self._next - size] = size
        return *self._did("cuMemAddressReserve"), driver.CUdeviceptr(self._next - size)

    def cuMemCreate(self, size: int, properties: Any, flags: int) -> tuple[Any, ...]:
        self._check_location(properties)
        if size <= 0 or size % GRANULE or flags:
            return INVALID, None
        if size > self.free * GRANULE:
            return FULL, None
        self.free -= size // GRANULE
        self._next += 1
        self.handles[self._next] = size
        return *self._did("cuMemCreate"), self._next

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        if self._refuses == "cuMemMap":
            return (REFUSED,)
        inside = any(first <= address and address + size <= first + count for first, count in self.reserved.items())
        over = any(address < first + count and first < address + size for first, (count, _) in self.mapped.items())
        if not inside or over or address % GRANULE or offset or flags or size != self.handles.get(handle):
            return (INVALID,)
        self.mapped[address] = size, False
        return self._did("cuMemMap")

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        size = self.handles.pop(handle)
        if "cuMemMap" not in self.done[-1:]:
            self.free += size // GRANULE
        return (OK,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[Any, ...]:
        [one] = access
        self._check_location(one)
        readable = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        if self.mapped.get(address) != (size, False) or count != 1 or one.flags != readable:
            return (INVALID,)
        self.mapped[address] = size, True
        return self._did("cuMemSetAccess")

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> tuple[Any, ...]:
        assert self.mapped.get(address) == (size, True) and value == 0 and stream == 7, "an illegal address"
        self.zeroed.append((address, size))
        return self._did("cuMemsetD8Async")

    def cuMemUnmap(self, address: int, size: int) -> tuple[Any, ...]:
        assert "cuStreamSynchronize" in self.done, "memory was unmapped under the work that uses it"
        if self.mapped.get(address, (0, False))[0] != size:
            return (INVALID,)
        del self.mapped[address]
        self.free += size // GRANULE
        return self._did("cuMemUnmap")

    def cuMemAddressFree(self, address: int, size: int) -> tuple[Any, ...]:
        if self.reserved.get(address) != size or self.mapped:
            return (INVALID,)
        del self.reserved[address]
        return self._did("cuMemAddressFree")

    def _did(self, call: str) -> tuple[Any, ...]:
        self.done.append(call)
        return (OK,)

    @staticmethod
    def _check_location(holder: Any) -> None:
        location = holder.location
        assert location.type == driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE and location.id == 1
