"""What conditional nodes cost: µs for each turn of a WHILE, and for each IF in it that is skipped or taken, against a plain node.

Bodies hold one-thread kernels, so that the nodes themselves are what takes the time.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from tide_plugins.launch.cuda_driver import CudaDriver
from tide_runtime.bundle.architectures import architecture_for

from benchmarks.gpu.conditional_kernel import conditional_node
from benchmarks.gpu.driver_api import AbsentDriverApi, DriverApi
from benchmarks.gpu.kit.case import Bench, Figures, KitCase
from benchmarks.gpu.small_kernel import compile_cubin

_SOURCE = b"""
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
typedef unsigned long long handle;

// counts: turns left, turns, bodies of conditions that ran.
extern "C" __global__ void turn(handle loop, handle a, handle b, handle c, handle d, int conditions, int taken, int* counts) {
  const handle all[4] = {a, b, c, d};
  for (int i = 0; i < conditions; ++i) cudaGraphSetConditional(all[i], taken);
  ++counts[1];
  cudaGraphSetConditional(loop, --counts[0] > 0);
}
extern "C" __global__ void body(int* counts) { atomicAdd(&counts[2], 1); }
"""
_TURNS, _REPEATS = 2000, 7


@dataclass(frozen=True)
class Form:
    """A loop with ``conditions`` IF nodes in its body, one behind the other or each inside the one before, of whose bodies all
    are ``taken`` or none; ``kernels``: further plain nodes in the body."""

    name: str
    conditions: int = 0
    taken: bool = False
    nested: bool = False
    kernels: int = 0


FORMS = (
    Form("turn"),
    Form("turn_2_kernels", kernels=1),
    Form("turn_5_kernels", kernels=4),
    Form("if_skipped", 1),
    Form("if_taken", 1, True),
    Form("4_ifs_skipped", 4),
    Form("4_ifs_taken", 4, True),
    Form("4_nested_taken", 4, True, True),
)


class Loop:
    """The executable graph of ``form`` on the GPU of the current context; ``arch``: its architecture, such as sm_90."""

    def __init__(self, api: DriverApi, arch: str, form: Form) -> None:
        self._api, self._call, self.form = api, api.call, form
        module = self._call("cuModuleLoadData", compile_cubin(_SOURCE, arch))
        turn, body = (self._call("cuModuleGetFunction", module, name) for name in (b"turn", b"body"))
        self.counts = self._call("cuMemAlloc", 12)
        graph, context = self._call("cuGraphCreate", 0), self._call("cuCtxGetCurrent")
        loop = self._call("cuGraphConditionalHandleCreate", graph, context, 1, 1)
        _, inside = conditional_node(api, graph, loop, "WHILE", [])
        nodes, handles, owner = list[Any](), list[Any](), inside
        for _ in range(form.conditions):
            handles.append(self._call("cuGraphConditionalHandleCreate", owner, context, 0, 0))
            node, opened = conditional_node(api, owner, handles[-1], "IF", [] if form.nested else nodes[-1:])
            nodes.append(node)
            self._kernel(opened, body, [], [], [])
            owner = opened if form.nested else owner
        padded = [int(handle) for handle in handles] + [0] * (4 - len(handles))
        types = [ctypes.c_uint64] * 5 + [ctypes.c_int32] * 2
        last = self._kernel(inside, turn, [int(loop), *padded, form.conditions, int(form.taken)], types, [])
        for _ in range(form.kernels):
            last = self._kernel(inside, body, [], [], [last])
        for node in nodes[:1]:
            self._call("cuGraphAddDependencies", inside, [last], [node], None, 1)
        self.graph = self._call("cuGraphInstantiate", graph, 0)

    def _kernel(self, graph: Any, kernel: Any, values: list[Any], types: list[Any], after: list[Any]) -> Any:
        node = self._api.names.CUDA_KERNEL_NODE_PARAMS()
        node.func = kernel
        node.gridDimX = node.gridDimY = node.gridDimZ = node.blockDimX = node.blockDimY = node.blockDimZ = 1
        node.kernelParams = ((*values, int(self.counts)), (*types, ctypes.c_void_p))
        return self._call("cuGraphAddKernelNode", graph, after or None, len(after), node)

    def seconds(self, turns: int) -> float:
        """Seconds from one launch until it is done. Raises AssertionError when the bodies that ran are not the expected ones."""
        counts = np.array([turns, 0, 0], np.int32)
        self._call("cuMemcpyHtoD", self.counts, counts.ctypes.data, counts.nbytes)
        self._call("cuCtxSynchronize")
        begin = time.perf_counter()
        self._call("cuGraphLaunch", self.graph, 0)
        self._call("cuCtxSynchronize")
        taken = time.perf_counter() - begin
        self._call("cuMemcpyDtoH", counts.ctypes.data, self.counts, counts.nbytes)
        form = self.form
        expected = [0, turns, turns * (form.kernels + (form.conditions if form.taken else 0))]
        assert counts.tolist() == expected, f"the counts are {counts.tolist()}, expected {expected}"
        return taken


def kit_cases(bench: Bench, argument: str) -> Iterator[KitCase]:
    for form in FORMS:
        yield KitCase(form.name, partial(_measured, form), partial(_assembled, form, bench))


def _measured(form: Form) -> Figures:
    loop = Loop(DriverApi(), architecture_for(CudaDriver().compute).name, form)
    loop.seconds(8)
    launch, whole = (median(loop.seconds(turns) for _ in range(_REPEATS)) for turns in (1, _TURNS))
    return {"us_per_turn": 1e6 * (whole - launch) / (_TURNS - 1), "launch_us": 1e6 * launch}


def _assembled(form: Form, bench: Bench) -> Figures:
    api = AbsentDriverApi()
    Loop(api, bench.arch, form)
    return {"calls": len(api.calls)}
