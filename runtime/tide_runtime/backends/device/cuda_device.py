"""`Device` implemented by cuda.core, with cuda.bindings for copies of parts of a buffer."""

from __future__ import annotations

import ctypes
import re
import warnings
import weakref
from contextlib import AbstractContextManager, suppress
from importlib.metadata import PackageNotFoundError, version
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.device.deferred_frees import DeferredFrees
from tide_runtime.backends.device.device import ReservedMemory
from tide_runtime.backends.device.mapped_memory import AddressRange, MappedMemory, WholeMemory
from tide_runtime.backends.device.staging_ring import StagingRing
from tide_runtime.errors import DeviceMemoryError, TargetError

INSTALL = "pip install 'tide-llm[kernels]'"
_MIN_CORE = (1, 2)  # earlier ones name methods otherwise, list no captured nodes, or embed no graph where a body begins


def missing_cuda_core() -> str | None:
    """Reason why the package cuda-core cannot be used, with the command that installs it, or None."""
    try:
        found = version("cuda-core")
    except PackageNotFoundError:
        return f"the package cuda-core is not installed; {INSTALL}"
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < _MIN_CORE:
        return f"cuda-core {found} is installed, {'.'.join(map(str, _MIN_CORE))} or newer is needed; {INSTALL}"
    return None


class CudaMemory:
    """A cuda.core buffer, handed to ``frees`` when this object is deleted."""

    def __init__(self, buffer: Any, frees: DeferredFrees) -> None:
        self._buffer, self._frees = buffer, frees
        self.pointer = int(buffer.handle)

    def __del__(self) -> None:
        self._frees.drop(self._buffer)


class _PinnedBytes:
    """Exposes a pinned buffer to NumPy; arrays over it keep it alive."""

    def __init__(self, buffer: Any, count_bytes: int) -> None:
        self._buffer = buffer
        first = int(buffer.handle)
        self.addresses = range(first, first + count_bytes)
        self.__array_interface__ = {"data": (first, False), "shape": (count_bytes,), "typestr": "|u1", "version": 3}


class CudaMark:
    """A cuda.core event."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.sync()


class CudaDevice:
    """GPU number ``ordinal`` with a stream of its own.

    Raises:
        TargetError: cuda.core is not installed or too old, or this machine has no driver or no such GPU; with the reason.
    """

    kind = "cuda"

    def __init__(self, ordinal: int = 0) -> None:
        if (missing := missing_cuda_core()) is not None:
            raise TargetError(missing)
        try:
            from cuda.bindings import driver
            from cuda.core import Device, LegacyPinnedMemoryResource
        except ImportError as error:
            raise TargetError(f"running on a GPU needs cuda.core ({error}): {INSTALL}") from None
        self._api = driver
        self._device_of_thread = Device
        self.ordinal = ordinal
        try:
            self.gpu = Device(ordinal)
            self.gpu.set_current()
            self.core_stream = self.gpu.create_stream()
        except Exception as error:  # cuda.core raises several classes for a missing driver, GPU or ordinal
            raise TargetError(f"GPU {ordinal} cannot be used: {type(error).__name__}: {error}") from error
        self.stream = int(self.core_stream.handle)
        self._pinned = LegacyPinnedMemoryResource()
        self._pinned_bytes: weakref.WeakSet[_PinnedBytes] = weakref.WeakSet()
        lock = RLock()
        self.lock: AbstractContextManager[Any] = lock
        self._frees = DeferredFrees(lock)
        major, minor = self.gpu.compute_capability
        self.compute = 10 * major + minor
        self.name = self.gpu.name
        self._staging = StagingRing()

    def capturing(self) -> AbstractContextManager[None]:
        return self._frees.deferred()

    @property
    def is_capturing(self) -> bool:
        return self._frees.capturing

    def instantiate(self, builder: Any, frees_memory: bool) -> Any:
        """The executable graph of ``builder``, a cuda.core GraphBuilder that has captured, uploaded.

        ``frees_memory``: each launch frees allocations of its memory nodes that the last one has not, without which a second
        launch would fail (driver API, cuGraphLaunch).
        """
        from cuda.core.graph import GraphCompleteOptions

        graph = builder.complete(GraphCompleteOptions(auto_free_on_launch=frees_memory))
        graph.upload(self.core_stream)
        return graph

    def is_invalid(self, builder: Any) -> bool:
        """Whether a call that captures do not allow has made the capture of ``builder`` invalid."""
        _, status = self._api.cuStreamIsCapturing(builder.stream.handle)
        return status == self._api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED

    def discard(self, builder: Any) -> None:
        """End the capture of ``builder``, which gives no graph, and keep the object for as long as the process lives.

        The driver destroys the graph of an invalid capture, and of one with streams that are not joined. cuda-core up to 1.2
        destroys it again when the builder is closed or collected, which ends the process (cuda-python issue 2834).
        """
        self._api.cuStreamEndCapture(builder.stream.handle)  # returns the error that made the capture invalid
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(builder))

    def copies_host_memory(self, node: Any) -> bool:
        result = self._api.cuGraphMemcpyNodeGetParams(node.handle)
        self._check("cuGraphMemcpyNodeGetParams", result)
        copy = result[1]
        return self._is_foreign_host(copy.srcMemoryType, copy.srcHost, copy.srcDevice) or self._is_foreign_host(
            copy.dstMemoryType, copy.dstHost, copy.dstDevice
        )

    def _is_foreign_host(self, kind: Any, host: Any, device: Any) -> bool:
        """Whether an end of a copy is in host memory that is not `pinned`.

        A copy with the direction *default* has unified addresses; the driver has no attributes of pageable memory.
        """
        if kind == self._api.CUmemorytype.CU_MEMORYTYPE_UNIFIED:
            attribute = self._api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
            error, found = self._api.cuPointerGetAttribute(attribute, device)
            known = error == self._api.CUresult.CUDA_SUCCESS
            kind = found if known else self._api.CUmemorytype.CU_MEMORYTYPE_HOST
            host = device
        if kind != self._api.CUmemorytype.CU_MEMORYTYPE_HOST:
            return False
        return not any(int(host) in one.addresses for one in self._pinned_bytes)

    def use(self) -> None:
        # cuda.core keeps one Device a thread, and asks that of the calling thread whether it was made current.
        self._device_of_thread(self.ordinal).set_current()

    def allocate(self, count_bytes: int) -> CudaMemory:
        try:
            with self.lock:
                self._frees.free()
                buffer = self.gpu.allocate(max(count_bytes, 1), stream=self.core_stream)
                buffer.fill(0, stream=self.core_stream)
        except Exception as error:  # cuda.core's CUDAError is not part of its public names
            raise self._full(f"no {count_bytes / 2**20:.0f} MiB left ({error})") from error
        return CudaMemory(buffer, self._frees)

    def reserve(self, count_bytes: int) -> ReservedMemory:
        try:
            with self.lock:
                self._frees.free()
                self._trim_pool()
                addresses = AddressRange(self._api, self._check, self.ordinal, self.stream, count_bytes)
                return MappedMemory(addresses, self.lock, self._frees)
        except DeviceMemoryError:
            raise
        except TargetError as error:
            warnings.warn(
                f"{error}; {count_bytes / 2**20:.0f} MiB for keys and values are allocated at once", RuntimeWarning, stacklevel=2
            )
            return WholeMemory(self.allocate(count_bytes), count_bytes)

    def free_memory(self) -> int | None:
        """Bytes that can still be allocated; None where the GPU has the processor's memory, in which the driver counts what
        files keep as taken."""
        api, check = self._api, self._check
        self.use()
        device = check("cuDeviceGet", api.cuDeviceGet(self.ordinal))
        integrated = api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED
        if check("cuDeviceGetAttribute", api.cuDeviceGetAttribute(integrated, device)):
            return None
        with self.lock:
            self._frees.free()
            self._trim_pool()
            return int(check("cuMemGetInfo", api.cuMemGetInfo()))

    def _trim_pool(self) -> None:
        """Give what `allocate`'s pool keeps of freed memory back, which others could not have."""
        api, check = self._api, self._check
        with suppress(TargetError):  # a GPU without memory pools
            pool = check("cuDeviceGetMemPool", api.cuDeviceGetMemPool(check("cuDeviceGet", api.cuDeviceGet(self.ordinal))))
            check("cuMemPoolTrimTo", api.cuMemPoolTrimTo(pool, 0))

    def zero(self, pointer: int, count_bytes: int) -> None:
        with self.lock:
            self._check("cuMemsetD8Async", self._api.cuMemsetD8Async(pointer, 0, count_bytes, self.stream))

    def pinned(self, count_bytes: int) -> NDArray[np.uint8]:
        held = _PinnedBytes(self._pinned.allocate(count_bytes), count_bytes)
        self._pinned_bytes.add(held)
        return np.asarray(held)

    def upload(self, pointer: int, source: NDArray[Any]) -> None:
        with self.lock:
            self._check("cuMemcpyHtoDAsync", self._api.cuMemcpyHtoDAsync(pointer, source.ctypes.data, source.nbytes, self.stream))

    def upload_copy(self, pointer: int, source: NDArray[Any]) -> None:
        self._staging.upload(self, pointer, source)

    def download(self, target: NDArray[Any], pointer: int) -> None:
        with self.lock:
            self._check("cuMemcpyDtoHAsync", self._api.cuMemcpyDtoHAsync(target.ctypes.data, pointer, target.nbytes, self.stream))

    def copy(self, target: int, source: int, count_bytes: int) -> None:
        with self.lock:
            self._check("cuMemcpyDtoDAsync", self._api.cuMemcpyDtoDAsync(target, source, count_bytes, self.stream))

    def copy_strided(
        self, target: int, source: int, pitch: int, width: int, height: int, source_pitch: int | None = None
    ) -> None:
        device = self._api.CUmemorytype.CU_MEMORYTYPE_DEVICE
        parameters = self._api.CUDA_MEMCPY2D()
        parameters.srcMemoryType = device
        parameters.srcDevice = source
        parameters.srcPitch = source_pitch or pitch
        parameters.dstMemoryType = device
        parameters.dstDevice = target
        parameters.dstPitch = pitch
        parameters.WidthInBytes, parameters.Height = width, height
        with self.lock:
            self._check("cuMemcpy2DAsync", self._api.cuMemcpy2DAsync(parameters, self.stream))

    def mark(self) -> CudaMark:
        with self.lock:
            return CudaMark(self.core_stream.record())

    def synchronize(self) -> None:
        self.mark().wait()  # an event, because synchronizing a stream fails while another thread captures it

    def _check(self, call: str, result: tuple[Any, ...]) -> Any:
        """The value of a call's ``result``, see `driver_value`. Raises DeviceMemoryError when memory is short."""
        if result[0] == self._api.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise self._full(f"no memory left ({call})")
        return driver_value(self._api, self.ordinal, call, result)

    def _full(self, what: str) -> DeviceMemoryError:
        return DeviceMemoryError(
            f"GPU {self.ordinal} ({self.name}) has {what}; run fewer sequences at once (max_batch), or export with a smaller "
            "--max-seq-len"
        )


def driver_value(api: Any, gpu: int, call: str, result: tuple[Any, ...]) -> Any:
    """The value of a driver call's ``result`` in module ``api``, if it has one. Raises TargetError when the call failed."""
    if result[0] != api.CUresult.CUDA_SUCCESS:
        _, text = api.cuGetErrorString(result[0])
        meaning = text.decode() if text else "no description"
        raise TargetError(f"{call} on GPU {gpu} failed: {result[0].name}: {meaning}")
    return result[1] if len(result) > 1 else None
