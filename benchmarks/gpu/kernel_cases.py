"""The kernels' cases on a GPU: the same inputs and checks as the host tests', and the same bits in every repetition.

Without a GPU every case is made, its launch is prepared for ``--arch``, and nothing runs (exit code 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import typer
from numpy.typing import NDArray
from rich.progress import track
from tide_plugins.conformance import Case, CaseSpec, cases
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.launch.stream_handle import LEGACY_DEFAULT_STREAM
from tide_runtime.bundle.architectures import architectures
from tide_runtime.errors import TargetError

from benchmarks.gpu.absent_gpu import AbsentGpu, say_not_run
from benchmarks.gpu.device_copy import DeviceCopy
from benchmarks.gpu.gpu import Gpu
from benchmarks.gpu.gpu_report import gpu_report
from benchmarks.gpu.kit.case import Bench, Figures, KitCase

Array = NDArray[Any]
_STREAM = LEGACY_DEFAULT_STREAM


def run_case(case: Case, library: KernelLibrary, gpu: Gpu, repeats: int) -> None:
    """Launch ``repeats`` times on fresh copies of the inputs.

    Raises:
        AssertionError: the first result is wrong, or a later one differs from it in any bit.
        TideError: the launch failed.
    """
    copy = DeviceCopy(gpu, case.tensors)
    copy.upload()  # before the preparation: scratch memory is zeroed on the same stream
    launch = case.prepare(library, stream=_STREAM, **copy.arrays, **case.numbers)
    first: dict[str, Array] = {}
    for repeat in range(repeats):
        copy.upload()
        launch.enqueue(_STREAM)
        gpu.synchronize()
        result = copy.download()
        if repeat == 0:
            case.check(result)
            first = result
        assert_same_bits(first, result, repeat)


def assert_same_bits(first: Mapping[str, Array], result: Mapping[str, Array], repeat: int) -> None:
    """Raises AssertionError with the first tensor that differs."""
    for name, array in result.items():
        if array.tobytes() != first[name].tobytes():
            raise AssertionError(f"{name} of repetition {repeat} differs from the first")


def run_all(specs: Sequence[CaseSpec], library: KernelLibrary, gpu: Gpu, repeats: int) -> dict[str, str]:
    """Kernel and case → what is wrong, for the cases that fail: a kernel that cannot be loaded is not the end of the others.

    Raises TargetError when the GPU's context is lost, which every later case would fail of.
    """
    failures = {}
    for spec in track(specs, "on the GPU", transient=True):
        try:
            run_case(spec.build(), library, gpu, repeats)
        except AssertionError as error:
            failures[f"{spec.kernel} {spec.name}"] = str(error)
        except Exception as error:  # TIDE's own, and those that cuda.core and NumPy raise
            failures[f"{spec.kernel} {spec.name}"] = f"{type(error).__name__}: {error}"
            gpu.synchronize()
        gpu.free_all()
    return failures


def prepare_case(case: Case, library: KernelLibrary, gpu: AbsentGpu) -> None:
    """All that comes before the launch, with addresses that are never read."""
    case.prepare(library, stream=_STREAM, **DeviceCopy(gpu, case.tensors).arrays, **case.numbers)


def spread(specs: Sequence[CaseSpec], most: int) -> list[CaseSpec]:
    """At most ``most`` cases of each kernel, evenly over its list; 0: all."""
    if not most:
        return list(specs)
    kernels = dict.fromkeys(spec.kernel for spec in specs)
    lists = [[spec for spec in specs if spec.kernel == kernel] for kernel in kernels]
    return [spec for some in lists for spec in some[:: -(-len(some) // most)]]


def kit_cases(bench: Bench, argument: str) -> Iterator[KitCase]:
    """``argument``: `loop` or a kernel's name, and the repetitions; a loop's kernels are all but the router's."""
    group, repeats = argument.split()
    for spec in cases():
        if (spec.kernel in _OUTSIDE_LOOPS) != (group == "loop") and (group == "loop" or spec.kernel == group):
            name = f"{spec.kernel} {spec.name}"
            yield KitCase(name, partial(_run, spec, int(repeats)), partial(_prepare, spec, bench.compute))


_OUTSIDE_LOOPS = ("exit_router",)


def _run(spec: CaseSpec, repeats: int) -> Figures:
    gpu, library = _gpu()
    try:
        run_case(spec.build(), library, gpu, repeats)
    finally:
        gpu.free_all()
    return {}


def _prepare(spec: CaseSpec, compute: int) -> Figures:
    gpu, library = _absent(compute)
    prepare_case(spec.build(), library, gpu)
    return {}


@cache
def _gpu() -> tuple[Gpu, KernelLibrary]:
    gpu = Gpu()
    return gpu, KernelLibrary(gpu.driver)


@cache
def _absent(compute: int) -> tuple[AbsentGpu, KernelLibrary]:
    gpu = AbsentGpu(compute)
    return gpu, KernelLibrary(gpu)


def main(
    repeats: Annotated[int, typer.Option(min=1, help="Launches of each case; all have to give the same bits.")] = 100,
    only: Annotated[str, typer.Option(help="Cases whose kernel or name contains this text.")] = "",
    most: Annotated[int, typer.Option(min=0, help="Cases of each kernel; 0: all.")] = 0,
    arch: Annotated[str, typer.Option(help="Without a GPU: the architecture to prepare launches for.")] = "sm_90",
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Run the kernels' cases on the GPU. Exit code 0: all right; 1: some are wrong; 2: not run."""
    specs = spread([spec for spec in cases() if only in f"{spec.kernel} {spec.name}"], most)
    try:
        gpu = Gpu()
    except TargetError as reason:
        [architecture] = architectures(arch)
        absent = AbsentGpu(architecture.compute)
        library = KernelLibrary(absent)
        for spec in track(specs, "up to the launch", transient=True):
            prepare_case(spec.build(), library, absent)
        say_not_run(reason, f"{len(specs)} cases were prepared for {arch} up to the launch; none was launched")
    failures = run_all(specs, KernelLibrary(gpu.driver), gpu, repeats)
    report = gpu_report("kernel_cases", gpu.driver.name, repeats=repeats, only=only)
    report.rows = [{"case": name, "error": error} for name, error in failures.items()]
    for kernel, count in Counter(spec.kernel for spec in specs).items():
        report.add(f"{kernel}_cases", count)
    report.add("failures", len(failures))
    for name, error in failures.items():
        print(f"FAILED {name}: {error}")
    report.finish(json)
    raise typer.Exit(1 if failures else 0)


if __name__ == "__main__":
    typer.run(main)
