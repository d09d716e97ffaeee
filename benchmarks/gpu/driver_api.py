"""CUDA's driver API through cuda.bindings, errors as exceptions; and a stand-in that refuses to know anything of a GPU."""

from __future__ import annotations

from inspect import signature
from typing import Any

from tide_runtime.errors import TargetError


class DriverApi:
    """Calls on the current context."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self.names = driver

    def call(self, name: str, *arguments: Any) -> Any:
        """The value that ``name`` returns, a tuple of several, or None. Raises TargetError with CUDA's name of an error."""
        error, *values = getattr(self.names, name)(*arguments)
        if error != self.names.CUresult.CUDA_SUCCESS:
            raise TargetError(f"{name}: {error.name}")
        return tuple(values) if len(values) > 1 else values[0] if values else None


_MAKES = {  # call → the class of what it returns
    "cuGraphCreate": "CUgraph",
    "cuGraphConditionalHandleCreate": "CUgraphConditionalHandle",
    "cuGraphAddNode": "CUgraphNode",
    "cuGraphAddKernelNode": "CUgraphNode",
    "cuGraphAddChildGraphNode": "CUgraphNode",
    "cuGraphInstantiate": "CUgraphExec",
    "cuModuleLoadData": "CUmodule",
    "cuModuleGetFunction": "CUfunction",
    "cuStreamCreate": "CUstream",
    "cuStreamEndCapture": "CUgraph",
    "cuMemAlloc": "CUdeviceptr",
    "cuCtxGetCurrent": "CUcontext",
}


class AbsentDriverApi(DriverApi):
    """Every call exists in cuda.bindings and takes these arguments; objects are made, graphs stay empty.

    ``calls``: names in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def call(self, name: str, *arguments: Any) -> Any:
        signature(getattr(self.names, name)).bind(*arguments)
        self.calls.append(name)
        return getattr(self.names, _MAKES[name])() if name in _MAKES else None
