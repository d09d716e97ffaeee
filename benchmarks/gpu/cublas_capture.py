"""Which nodes a captured cublasGemmEx leaves in a CUDA graph, and whether the body of a WHILE node takes them as a child graph.

Without a workspace of the caller's, cuBLAS allocates one under capture, as memory nodes, which a conditional body refuses; ONNX
Runtime sets none. One process per `ARMS` entry, because cuBLAS reads its environment once. Source: cuBLAS documentation, section
"CUDA Graphs Support", and CUDA Programming Guide, "Conditional Graph Node Body Requirements".
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from tide_plugins.launch.cuda_driver import CudaDriver
from tide_runtime.errors import TargetError

from benchmarks.gpu.conditional_kernel import conditional_body
from benchmarks.gpu.driver_api import AbsentDriverApi, DriverApi
from benchmarks.gpu.kit.case import Bench, Figures, KitCase

# Name → value of CUBLAS_WORKSPACE_CONFIG; "own" calls cublasSetWorkspace.
ARMS: dict[str, str | None] = {"default": None, "none": ":0:0", "small": ":16:8", "own": None}
# [m, n, k] of decode steps: projections of one and of eight tokens, and a head.
SHAPES = ((2048, 1, 8192), (8192, 1, 2048), (8192, 8, 2048), (128256, 1, 2048))
_WORKSPACE_BYTES = 32 * 2**20  # cuBLAS's recommendation for Hopper
_HALF, _FLOAT_COMPUTE, _DEFAULT_ALGORITHM = 2, 68, -1  # CUDA_R_16F, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT


class Cublas:
    """cuBLAS 13 from its wheel, or from the library path. ``handle`` on the stream that is given."""

    def __init__(self) -> None:
        for name in ("libcublasLt.so.13", "libcublas.so.13"):  # the second needs the first
            self._library = ctypes.CDLL(_in_wheel(name), mode=ctypes.RTLD_GLOBAL)
        self.handle = ctypes.c_void_p()

    def create(self, stream: int) -> None:
        self.call("cublasCreate_v2", ctypes.byref(self.handle))
        self.call("cublasSetStream_v2", self.handle, ctypes.c_void_p(stream))

    def gemm(self, m: int, n: int, k: int, a: int, b: int, c: int) -> None:
        """c = a · b, column-major halves; computed in float."""
        self.call("cublasGemmEx", *self.arguments(m, n, k, a, b, c))

    def arguments(self, m: int, n: int, k: int, a: int, b: int, c: int) -> tuple[Any, ...]:
        """Arguments of cublasGemmEx, scalars on the host."""
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        left = (self.handle, 0, 0, m, n, k, ctypes.byref(one), ctypes.c_void_p(a), _HALF, m, ctypes.c_void_p(b), _HALF, k)
        return (*left, ctypes.byref(zero), ctypes.c_void_p(c), _HALF, m, _FLOAT_COMPUTE, _DEFAULT_ALGORITHM)

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise TargetError(f"{name} returned {status}")


def _in_wheel(name: str) -> str:
    try:
        files = distribution("nvidia-cublas").files or []
    except PackageNotFoundError:
        return name
    return next((str(file.locate()) for file in files if Path(file).name == name), name)


def captured_gemms(api: DriverApi, cublas: Cublas, own_workspace: bool) -> dict[str, Any]:
    """Shape → node types of the captured call, whether a WHILE body takes them, and whether a flat graph of them runs."""
    stream = api.call("cuStreamCreate", 1)  # non-blocking
    cublas.create(int(stream))
    if own_workspace:
        workspace = ctypes.c_void_p(int(api.call("cuMemAlloc", _WORKSPACE_BYTES)))
        cublas.call("cublasSetWorkspace_v2", cublas.handle, workspace, ctypes.c_size_t(_WORKSPACE_BYTES))
    return {"x".join(map(str, shape)): _captured(api, cublas, stream, *shape) for shape in SHAPES}


def _captured(api: DriverApi, cublas: Cublas, stream: Any, m: int, n: int, k: int) -> dict[str, Any]:
    places = [int(api.call("cuMemAlloc", 2 * count)) for count in (m * k, k * n, m * n)]
    cublas.gemm(m, n, k, *places)  # loads its kernels, as the host's first run does
    api.call("cuStreamSynchronize", stream)
    api.call("cuStreamBeginCapture", stream, api.names.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        cublas.gemm(m, n, k, *places)
    finally:
        graph = api.call("cuStreamEndCapture", stream)
    found = {"nodes": node_types(api, graph), "in_while_body": _tried(lambda: embed_in_while(api, graph))}
    found["flat"] = _tried(lambda: _launch_twice(api, graph, stream))
    for place in places:
        api.call("cuMemFree", place)
    return found


def node_types(api: DriverApi, graph: Any) -> dict[str, int]:
    """Type → how many nodes of ``graph`` have it, children included."""
    types: Counter[str] = Counter()
    _, count = api.call("cuGraphGetNodes", graph, 0)
    nodes, _ = api.call("cuGraphGetNodes", graph, count)
    for node in nodes:
        kind = api.call("cuGraphNodeGetType", node).name.removeprefix("CU_GRAPH_NODE_TYPE_")
        types[kind] += 1
        if kind == "GRAPH":
            types.update(node_types(api, api.call("cuGraphChildGraphNodeGetGraph", node)))
    return dict(types)


def embed_in_while(api: DriverApi, child: Any) -> None:
    """Raises TargetError unless ``child`` can be a child graph in the body of a WHILE node."""
    graph = api.call("cuGraphCreate", 0)
    handle = api.call("cuGraphConditionalHandleCreate", graph, api.call("cuCtxGetCurrent"), 0, 1)
    api.call("cuGraphAddChildGraphNode", conditional_body(api, graph, handle, "WHILE", []), None, 0, child)
    api.call("cuGraphInstantiate", graph, 0)


def _launch_twice(api: DriverApi, graph: Any, stream: Any) -> None:
    """Without waiting in between, as a loop of flat turns does."""
    executable = api.call("cuGraphInstantiate", graph, 0)
    for _ in range(2):
        api.call("cuGraphLaunch", executable, stream)
    api.call("cuStreamSynchronize", stream)


def _tried(work: Any) -> str:
    try:
        work()
    except TargetError as error:
        return str(error)
    return "accepted"


def prepare() -> dict[str, Any]:
    """Everything but cuBLAS itself, which needs a GPU: its library is loaded where there is one, arguments are made."""
    api, made = AbsentDriverApi(), {}
    try:
        cublas: Cublas | None = Cublas()
        made["cublas"] = "loaded"
    except OSError as error:
        cublas, made["cublas"] = None, f"absent: {error}"
    if cublas is not None:
        made["arguments"] = str(len(cublas.arguments(*SHAPES[0], 256, 512, 768)))
    embed_in_while(api, api.call("cuGraphCreate", 0))
    return made | {"calls": len(api.calls)}


def kit_cases(bench: Bench, argument: str) -> Iterator[KitCase]:
    """``argument``: of `ARMS`."""
    if (config := ARMS[argument]) is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = config
    yield KitCase(argument, lambda: _on_gpu(argument), prepare)


def _on_gpu(arm: str) -> Figures:
    CudaDriver()  # makes the GPU's context current
    return captured_gemms(DriverApi(), Cublas(), own_workspace=arm == "own")
