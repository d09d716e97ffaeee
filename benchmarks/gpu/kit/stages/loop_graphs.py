"""Stage 3: decode loops over stub segments as CUDA graphs, without ONNX Runtime or TensorRT (review item B2)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from tide_plugins.launch.cuda_driver import CudaDriver
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.loop_kernels import PluginLoopKernels
from tide_runtime.backends.device.cuda_device import CudaDevice
from tide_runtime.device_loop.select import no_graphs

from benchmarks.gpu.graph_cases import FORMS, GraphCase, StubKernels, graph_cases, refused_capture, run_case, with_workspaces
from benchmarks.gpu.kit.case import Bench, Figures, KitCase, NotRun
from benchmarks.gpu.kit.without_gpu import assembled_stub_loop, refuse_on_simulated_gpu

_SECONDS = 1.5


def cases(bench: Bench) -> Iterator[KitCase]:
    for case in graph_cases():
        yield KitCase(
            case.name,
            _SECONDS,
            lambda case=case: _run(case),  # type: ignore[misc]
            lambda case=case: {"nodes": assembled_stub_loop(case, bench.compute)},  # type: ignore[misc]
            limit=30,
        )
    yield KitCase("refused_capture", _SECONDS, _refused, refuse_on_simulated_gpu, limit=30)


def _run(case: GraphCase) -> Figures:
    """Both drivers, compared with each other and with Python; a graph whose loop does not end is stopped by the case's limit."""
    device, kernels, stub = _on_gpu()
    allocates = FORMS[case.form][1]
    return run_case(case, device, kernels, with_workspaces(stub.launch) if allocates else stub.launch)


def _refused() -> Figures:
    """What a user meets whose ONNX Runtime or TensorRT waits inside a run: a reason, in a process that lives on."""
    from cuda.bindings import driver

    return refused_capture(_on_gpu()[0], driver.cuStreamSynchronize)


@cache
def _on_gpu() -> tuple[CudaDevice, PluginLoopKernels, StubKernels]:
    if (reason := no_graphs()) is not None:
        raise NotRun(reason)
    device, driver = CudaDevice(), CudaDriver()
    library = KernelLibrary(driver)
    return device, PluginLoopKernels(library, device.stream), StubKernels(driver, library.architecture.name)
