"""Stage 5: the router's kernel against its floors, torch eager and torch.compile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import cache

import torch
from tide_plugins.launch.cuda_driver import CudaDriver
from tide_plugins.launch.kernel_library import KernelLibrary

from benchmarks.gpu.absent_gpu import AbsentGpu
from benchmarks.gpu.gpu_floors import NOTHING, Floors, measure_floors
from benchmarks.gpu.kit.case import Bench, Figures, KitCase
from benchmarks.gpu.router_arms import RouterTensors, torch_arm
from benchmarks.gpu.router_kernel import measure, prepare_launch, row_of
from benchmarks.gpu.router_problem import RouterProblem, problems
from benchmarks.gpu.small_kernel import compile_cubin

_SECONDS = 9.0  # of a problem; most of it compiles torch's arm


def cases(bench: Bench) -> Iterator[KitCase]:
    """Everything in fp16, and the middle size in bf16."""
    yield KitCase("floors", 8, lambda: asdict(_floors()), lambda: {"cubin_bytes": len(compile_cubin(NOTHING, bench.arch))})
    some = [problem for problem in problems() if problem.dtype == "f16" or problem.hidden_size == 4096]
    for problem in sorted(some, key=lambda problem: problem.hidden_size != 4096):
        yield KitCase(
            problem.name,
            _SECONDS,
            lambda problem=problem: _measured(problem),  # type: ignore[misc]
            lambda problem=problem: _prepared(problem, bench),  # type: ignore[misc]
            limit=90,
        )


def _measured(problem: RouterProblem) -> Figures:
    floors, arms = _floors(), measure(problem, _library(), None)
    ratios = {f"vs_{name}": arm["gpu_us"] / arms["tide"]["gpu_us"] for name, arm in arms.items() if "gpu_us" in arm}
    return row_of(problem, floors, arms) | ratios


@cache
def _floors() -> Floors:
    CudaDriver()
    return measure_floors()


@cache
def _library() -> KernelLibrary:
    return KernelLibrary(CudaDriver())


def _prepared(problem: RouterProblem, bench: Bench) -> Figures:
    """TIDE's launch, and torch's arms where they take no time on a processor: run, and traced by dynamo."""
    gpu = AbsentGpu(bench.compute)
    prepare_launch(problem, KernelLibrary(gpu), gpu)
    traced = problem.rows == 1
    if traced:
        given = RouterTensors.random(problem, device="cpu")
        with torch.no_grad():
            for arm in (torch_arm(given, compiled=False), torch_arm(given, compiled=True, backend="eager")):
                arm()
    return {"bytes": problem.bytes, "torch_traced": traced}
