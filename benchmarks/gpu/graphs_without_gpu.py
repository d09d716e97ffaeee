"""What a dry run puts in a GPU's place for decode loops over stub segments: the tests' simulated GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from ctypes import Structure
from typing import Any

from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.loop_kernels import PluginLoopKernels
from tide_plugins.plans import LaunchPlan
from tide_runtime.backends.device.program import Node, Run
from tide_runtime.depth.exit import ExitDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.device_loop.decode_loop import DecodeLoop, LoopExit
from tide_runtime.device_loop.graph_driver import GraphDriver
from tide_runtime.device_loop.host_driver import HostDriver

from benchmarks.gpu.absent_gpu import AbsentGpu
from benchmarks.gpu.graph_cases import EXITS, FORMS, GraphCase, StubKernels, refused_capture
from benchmarks.gpu.stub_segments import StubBackend

_TURNS, _WINDOW = 16, 8


def assembled_stub_loop(case: GraphCase, compute: int) -> dict[str, int]:
    """The node types of the graph that a loop over stub segments is captured in.

    Kernels are compiled and their launches prepared; the simulated GPU records instead of launching.
    """
    gpu = _simulated_gpu()
    stub = StubKernels(_RecordingGpu(compute, gpu), f"sm_{compute}").launch
    fixed_stream, allocates = FORMS[case.form]

    def launch(symbol: str, blocks: int, arguments: Structure, stream: int) -> None:
        workspace = gpu.malloc_async(stream) if allocates else None
        stub(symbol, blocks, arguments, stream)
        if allocates:
            gpu.free_async(stream, workspace)

    backend = StubBackend(gpu, EXITS[case.exits], launch, fixed_stream)
    exits = (
        [LoopExit(s.exit, s.threshold) for s in ExitDepth(backend.manifest, DepthOptions()).stops] if EXITS[case.exits] else []
    )
    return _captured(backend, gpu, case.rows, compute, exits)


def refuse_on_simulated_gpu() -> dict[str, str]:
    """`refused_capture` where a simulated call makes the capture invalid."""
    from runtime.simulated_gpu import CudaError

    gpu = _simulated_gpu()

    def synchronize(stream: int) -> None:
        with suppress(CudaError):  # the driver's function returns its error
            gpu.synchronize_stream(stream)

    return refused_capture(gpu, synchronize)


def _simulated_gpu() -> Any:
    from runtime.simulated_gpu import SimulatedGpu

    return SimulatedGpu()


def _captured(backend: Any, gpu: Any, rows: int, compute: int, exits: list[LoopExit]) -> dict[str, int]:
    kernels = PluginLoopKernels(KernelLibrary(_RecordingGpu(compute, gpu)), gpu.stream)
    loop = DecodeLoop(backend.context(rows), rows, kernels, _TURNS, exits, _WINDOW)
    cached, tokens, limits = ([number] * rows for number in (3, 5, 12))
    loop.launch(HostDriver(gpu).compile(loop.program).launch, cached, tokens, limits, [])
    _run_every_node(loop.program, gpu.stream)
    return dict(GraphDriver(gpu).compile(loop.program).node_types)


def _run_every_node(program: Sequence[Node], stream: int) -> None:
    """As the host's first launches do, since a capture must neither bind nor allocate: here no kernel sets a condition."""
    for node in program:
        if isinstance(node, Run):
            node.enqueue(stream)
        else:
            _run_every_node(node.body, stream)


class _RecordingGpu(AbsentGpu):
    """Launches are recorded by the simulated GPU that has the memory."""

    def __init__(self, compute: int, gpu: Any) -> None:
        super().__init__(compute)
        self._gpu = gpu

    def zeros(self, count_bytes: int, stream: int) -> Any:
        return self._gpu.allocate(count_bytes)

    def launch(self, entry: str, plan: LaunchPlan, params: Structure, stream: int, arguments: Sequence[str] = ()) -> None:
        self._gpu.submit(stream, lambda: None)
