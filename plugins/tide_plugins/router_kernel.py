"""The router's kernel for backends that run operators. The runtime finds `load` by its entry point, ``router_kernel``."""

from __future__ import annotations

from dataclasses import dataclass

from tide_plugins.launch.cuda_driver import CudaDriver
from tide_plugins.launch.device_array import DeviceArray
from tide_plugins.launch.exit_router_launch import prepare_exit_router
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.plans import plan_exit_router


def load(device: int) -> RouterKernel:
    """The kernel for GPU number ``device``, compiled on first use.

    Raises TideError when the GPU cannot be used or its architecture is not supported.
    """
    return RouterKernel(KernelLibrary(CudaDriver(device)))


@dataclass(frozen=True)
class RouterKernel:
    """`exit_router` from ``library`` on raw device memory, allocating nothing, so that a capture may hold it."""

    library: KernelLibrary

    def partial(self, rows: int, hidden_size: int, width: int) -> int:
        """Float32 elements of scratch memory that `enqueue` needs."""
        return plan_exit_router(rows, hidden_size, width).partial

    def enqueue(self, epsilon: float, stream: int, **tensors: tuple[int, tuple[int, ...], str]) -> None:
        """Queue the launches on ``stream``.

        ``tensors``: device address, shape and dtype of each tensor of `prepare_exit_router`, and of the scratch ``partial``.

        Raises ParamsError when a tensor breaks the kernel's contract, TideError when the kernel cannot be compiled.
        """
        device = self.library.driver.device
        arrays = {name: DeviceArray(pointer, shape, dtype, device) for name, (pointer, shape, dtype) in tensors.items()}
        prepare_exit_router(self.library, epsilon=epsilon, stream=stream, **arrays).enqueue(stream)
