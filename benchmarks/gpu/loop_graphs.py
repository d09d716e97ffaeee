"""The kit's stage of decode loops over stub segments: on the GPU, or recorded by the tests' simulated GPU where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

from tide_plugins.launch.cuda_driver import CudaDriver
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.loop_kernels import PluginLoopKernels
from tide_runtime.backends.device.cuda_device import CudaDevice, missing_cuda_core

from benchmarks.gpu.graph_cases import FORMS, GraphCase, StubKernels, graph_cases, refused_capture, run_case, with_workspaces
from benchmarks.gpu.graphs_without_gpu import assembled_stub_loop, refuse_on_simulated_gpu
from benchmarks.gpu.kit.case import Bench, Figures, KitCase, NotRun


def kit_cases(bench: Bench, argument: str) -> Iterator[KitCase]:
    """Every case on the GPU; the same graphs, recorded by the tests' simulated GPU, where there is none."""
    yield KitCase("cuda_core", _require_graphs, dict)
    for case in graph_cases():
        yield KitCase(case.name, partial(_on_gpu, case), partial(_assembled, case, bench.compute))
    yield KitCase("refused_capture", _refused_on_gpu, refuse_on_simulated_gpu)


def _require_graphs() -> Figures:
    from cuda.core import __version__

    if (reason := missing_cuda_core()) is not None:
        raise NotRun(reason)
    return {"cuda_core": __version__}


def _on_gpu(case: GraphCase) -> Figures:
    """Both drivers, compared with each other and with Python; a graph whose loop does not end is stopped by the case's limit."""
    device, kernels, stub = _gpu()
    return run_case(case, device, kernels, with_workspaces(stub.launch) if FORMS[case.form][1] else stub.launch)


def _refused_on_gpu() -> Figures:
    """What a user meets whose ONNX Runtime or TensorRT waits inside a run: a reason, in a process that lives on."""
    from cuda.bindings import driver

    return refused_capture(_gpu()[0], driver.cuStreamSynchronize)


@cache
def _gpu() -> tuple[CudaDevice, PluginLoopKernels, StubKernels]:
    device, driver = CudaDevice(), CudaDriver()
    library = KernelLibrary(driver)
    return device, PluginLoopKernels(library, device.stream), StubKernels(driver, library.architecture.name)


def _assembled(case: GraphCase, compute: int) -> Figures:
    return {"nodes": assembled_stub_loop(case, compute)}
