"""The smallest graph with conditions: a WHILE whose body counts down, and inside it an IF that runs every second time.

Uses CUDA's driver API alone, so that a failure is the driver's, or the kernel's reference to cudaGraphSetConditional, and of no
library. Source: CUDA Programming Guide, "Conditional Graph Nodes".
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
from tide_plugins.launch.cuda_driver import CudaDriver
from tide_runtime.bundle.architectures import architecture_for

from benchmarks.gpu.driver_api import AbsentDriverApi, DriverApi
from benchmarks.gpu.kit.case import Bench, Figures, KitCase
from benchmarks.gpu.small_kernel import compile_cubin

_SOURCE = b"""
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);

// counts: left, passes, even passes.
extern "C" __global__ void pass(unsigned long long loop, unsigned long long even, int* counts) {
  const int left = --counts[0];
  ++counts[1];
  cudaGraphSetConditional(even, left % 2 == 0);
  cudaGraphSetConditional(loop, left > 0);
}

extern "C" __global__ void even_pass(int* counts) { ++counts[2]; }
"""
PASSES, EXPECTED = 6, [0, 6, 3]
_ASSIGN_DEFAULT = 1  # CU_GRAPH_COND_ASSIGN_DEFAULT: the handle has its default value whenever the graph is launched


class CountDown:
    """The graph on the GPU of the current context; ``arch``: its architecture, such as sm_90."""

    def __init__(self, api: DriverApi, arch: str) -> None:
        self._api, self._call = api, api.call
        module = self._call("cuModuleLoadData", compile_cubin(_SOURCE, arch))
        kernels = [self._call("cuModuleGetFunction", module, name) for name in (b"pass", b"even_pass")]
        self.counts = self._call("cuMemAlloc", 4 * len(EXPECTED))
        graph, context = self._call("cuGraphCreate", 0), self._call("cuCtxGetCurrent")
        loop = self._call("cuGraphConditionalHandleCreate", graph, context, 1, _ASSIGN_DEFAULT)
        body = self._condition(graph, loop, "WHILE", [])
        even = self._call("cuGraphConditionalHandleCreate", body, context, 0, 0)
        first = self._kernel(body, kernels[0], [(int(loop), ctypes.c_uint64), (int(even), ctypes.c_uint64)])
        self._kernel(self._condition(body, even, "IF", [first]), kernels[1], [])
        self.graph = self._call("cuGraphInstantiate", graph, 0)

    def run(self) -> list[int]:
        """What is in the counts after one launch."""
        counts = np.array([PASSES, 0, 0], np.int32)
        self._call("cuMemcpyHtoD", self.counts, counts.ctypes.data, counts.nbytes)
        self._call("cuGraphLaunch", self.graph, 0)
        self._call("cuCtxSynchronize")
        self._call("cuMemcpyDtoH", counts.ctypes.data, self.counts, counts.nbytes)
        return counts.tolist()

    def _condition(self, graph: Any, handle: Any, kind: str, after: list[Any]) -> Any:
        """The body of a new conditional node."""
        return conditional_body(self._api, graph, handle, kind, after)

    def _kernel(self, graph: Any, kernel: Any, arguments: list[tuple[int, Any]]) -> Any:
        """A node of one thread; the counts are its last argument."""
        node = self._api.names.CUDA_KERNEL_NODE_PARAMS()
        node.func = kernel
        node.gridDimX = node.gridDimY = node.gridDimZ = node.blockDimX = node.blockDimY = node.blockDimZ = 1
        values, types = zip(*arguments, (int(self.counts), ctypes.c_void_p), strict=True)
        node.kernelParams = (values, types)
        return self._call("cuGraphAddKernelNode", graph, None, 0, node)


def conditional_body(api: DriverApi, graph: Any, handle: Any, kind: str, after: list[Any]) -> Any:
    """The body of a conditional node that is added to ``graph``. ``kind``: IF or WHILE."""
    return conditional_node(api, graph, handle, kind, after)[1]


def conditional_node(api: DriverApi, graph: Any, handle: Any, kind: str, after: list[Any]) -> tuple[Any, Any]:
    """A conditional node that is added to ``graph``, and its body."""
    parameters = api.names.CUgraphNodeParams()
    parameters.type = api.names.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    parameters.conditional.handle, parameters.conditional.size = handle, 1
    parameters.conditional.type = getattr(api.names.CUgraphConditionalNodeType, f"CU_GRAPH_COND_TYPE_{kind}")
    parameters.conditional.ctx = api.call("cuCtxGetCurrent")
    node = api.call("cuGraphAddNode", graph, after or None, None, len(after), parameters)
    bodies = parameters.conditional.phGraph_out
    return node, bodies[0] if bodies else api.names.CUgraph()  # empty where no driver has filled it in


def kit_cases(bench: Bench, argument: str) -> Iterator[KitCase]:
    yield KitCase("count_down", _count_down, lambda: _assembled(bench))


def _count_down() -> Figures:
    """WHILE and a nested IF, set by kernels, without any library."""
    graph = CountDown(DriverApi(), architecture_for(CudaDriver().compute).name)
    found = [graph.run() for _ in range(2)]
    assert found == [EXPECTED] * 2, f"the counts are {found}, expected {EXPECTED} after both launches"
    return {"counts": found}


def _assembled(bench: Bench) -> Figures:
    api = AbsentDriverApi()
    CountDown(api, bench.arch)
    return {"calls": len(api.calls)}
