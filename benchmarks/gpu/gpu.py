"""A GPU for checks: launches through `CudaDriver`, memory of exact sizes, copies that wait."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray
from tide_plugins.launch.cuda_driver import CudaDriver
from tide_runtime.errors import TargetError


class Gpu:
    """GPU number ``device``.

    Raises:
        TargetError: there is none, or no driver; with the reason.
    """

    def __init__(self, device: int = 0) -> None:
        self.driver = CudaDriver(device)
        from cuda.bindings import driver

        self._api = driver
        self._allocations: list[int] = []

    def allocate(self, count_bytes: int) -> int:
        pointer = int(self._done("cuMemAlloc", *self._api.cuMemAlloc(count_bytes)))
        self._allocations.append(pointer)
        return pointer

    def upload(self, pointer: int, source: NDArray[Any]) -> None:
        self._done("cuMemcpyHtoD", *self._api.cuMemcpyHtoD(pointer, source.ctypes.data, source.nbytes))

    def download(self, target: NDArray[Any], pointer: int) -> None:
        self._done("cuMemcpyDtoH", *self._api.cuMemcpyDtoH(target.ctypes.data, pointer, target.nbytes))

    def synchronize(self) -> None:
        """Wait for everything; an error of an earlier launch is raised here."""
        self._done("cuCtxSynchronize", *self._api.cuCtxSynchronize())

    def free_all(self) -> None:
        """Free what `allocate` gave out."""
        while self._allocations:
            self._done("cuMemFree", *self._api.cuMemFree(self._allocations.pop()))

    def _done(self, call: str, error: Any, value: Any = None) -> Any:
        if error != self._api.CUresult.CUDA_SUCCESS:
            raise TargetError(f"{call} failed: {error.name}")
        return value
