"""`Driver` implemented by cuda.core and, for launches, cuda.bindings.

cuda.core's `launch` takes no structs by value (NVIDIA/cuda-python issue 2343); `cuLaunchKernel` does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure
from functools import partial
from typing import Any

from tide_runtime.backends.device.cuda_device import driver_value
from tide_runtime.errors import DeviceMemoryError, TargetError

from tide_plugins.plans import LaunchPlan


class BufferMemory:
    """A cuda.core buffer."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    @property
    def pointer(self) -> int:
        return int(self._buffer.handle)


class CudaDriver:
    """GPU number ``device``; its primary context becomes current in the calling thread.

    Raises:
        TargetError: cuda.core is not installed, or this machine has no driver or no such GPU; with the reason.
    """

    def __init__(self, device: int = 0) -> None:
        try:
            from cuda.bindings import driver
            from cuda.core import Device
        except ImportError as error:
            raise TargetError(f"launching kernels needs cuda.core ({error}): pip install 'tide-llm[kernels]'") from None
        self._api = driver
        self._value = partial(driver_value, driver, device)
        try:
            self._gpu = Device(device)
            self._gpu.set_current()
        except Exception as error:  # cuda.core raises several classes for a missing driver, GPU or ordinal
            raise TargetError(f"GPU {device} cannot be used: {type(error).__name__}: {error}") from error
        major, minor = self._gpu.compute_capability
        self.device = device
        self.compute = 10 * major + minor
        self.sm_count = self._gpu.properties.multiprocessor_count
        self.name = self._gpu.name

    def load(self, image: bytes, ptx: bool, symbol: str) -> Any:
        from cuda.core import ObjectCode

        self._gpu.set_current()
        try:
            code = ObjectCode.from_ptx(image) if ptx else ObjectCode.from_cubin(image)
            kernel = code.get_kernel(symbol)
            # Now, as loading on first use would resolve the image's references in the middle of a capture.
            function = self._value("cuKernelGetFunction", self._api.cuKernelGetFunction(int(kernel.handle)))
            self._value("cuFuncLoad", self._api.cuFuncLoad(function))
            return kernel
        except Exception as error:  # cuda.core's classes, such as for images that an older driver cannot load
            raise TargetError(f"GPU {self.device} cannot load {symbol}: {type(error).__name__}: {error}") from error

    def zeros(self, count_bytes: int, stream: int) -> BufferMemory:
        from cuda.core import Stream

        self._gpu.set_current()
        on = Stream.from_handle(stream)
        try:
            buffer = self._gpu.allocate(count_bytes, stream=on)
            buffer.fill(0, stream=on)
        except Exception as error:  # cuda.core's classes
            raise DeviceMemoryError(f"GPU {self.device} has no {count_bytes} bytes left ({error})") from error
        return BufferMemory(buffer)

    def launch(self, entry: Any, plan: LaunchPlan, params: Structure, stream: int, arguments: Sequence[str] = ()) -> None:
        offsets = [getattr(type(params), name).offset for name in arguments] or [0]
        addresses = (ctypes.c_void_p * len(offsets))(*(ctypes.addressof(params) + offset for offset in offsets))
        result = self._api.cuLaunchKernel(
            int(entry.handle), *plan.grid, *plan.block, plan.shared_bytes, stream, ctypes.addressof(addresses), 0
        )
        self._value("cuLaunchKernel", result)
