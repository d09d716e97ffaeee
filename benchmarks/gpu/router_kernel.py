"""The speed of `exit_router`, against two floors (its bytes over measured bandwidth; an empty launch), eager torch,
torch.compile, and, with ``--predecessor PATH``, the predecessor's published kernel compiled beside it.

Times are medians on the GPU of one evaluation with a cold L2 cache, as between decode steps, from CUDA graphs for every arm;
"call" columns are per call from Python, back to back. Without a GPU the launches are prepared for ``--arch`` and nothing is timed
(exit code 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from tide_bench.report import Report
from tide_plugins.launch.cuda_driver import CudaDriver
from tide_plugins.launch.device_array import ITEM_BYTES, DeviceArray
from tide_plugins.launch.exit_router import prepare_exit_router
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.launch.stream_handle import LEGACY_DEFAULT_STREAM
from tide_runtime.bundle.architectures import architectures
from tide_runtime.errors import TargetError

from benchmarks.gpu.absent_gpu import AbsentGpu, say_not_run
from benchmarks.gpu.cuda_timing import Work, call_time, gpu_time
from benchmarks.gpu.gpu_floors import NOTHING, Floors, measure_floors
from benchmarks.gpu.gpu_report import gpu_report
from benchmarks.gpu.kit.case import Bench, Figures, KitCase
from benchmarks.gpu.predecessor_kernel import compile_predecessor, predecessor_arm
from benchmarks.gpu.router_arms import EPSILON, RouterTensors, tide_arm, torch_arm
from benchmarks.gpu.router_problem import RouterProblem, problems
from benchmarks.gpu.small_kernel import compile_cubin

_SCORE_TOLERANCE = 1e-4  # all arithmetic is in float32; a score's error is relative


def prepare_without_gpu(some: Sequence[RouterProblem], arch: str, predecessor: Path | None) -> str:
    """Everything up to the launches; what was done, in words."""
    [architecture] = architectures(arch)
    gpu = AbsentGpu(architecture.compute)
    library = KernelLibrary(gpu)
    for problem in some:
        prepare_launch(problem, library, gpu)
    Console().print(_plans_table(some))
    if predecessor is not None:
        for dtype, hidden_size, width in sorted({(p.dtype, p.hidden_size, p.width) for p in some}):
            compile_predecessor(predecessor, dtype, hidden_size, width, arch)
    beside = "" if predecessor is None else "the predecessor's kernel was compiled; "
    return f"{len(some)} launches were prepared for {arch}; {beside}nothing was launched or timed"


def prepare_launch(problem: RouterProblem, library: KernelLibrary, gpu: AbsentGpu) -> None:
    """Prepare a launch on addresses that are never read."""
    tensors: dict[str, Any] = {
        name: DeviceArray(gpu.allocate(ITEM_BYTES[dtype] * shape[0] * shape[-1]), shape, dtype)
        for name, (dtype, shape) in problem.shapes().items()
    }
    prepare_exit_router(library, epsilon=EPSILON, stream=LEGACY_DEFAULT_STREAM, **tensors)


def measure(problem: RouterProblem, library: KernelLibrary, predecessor: Path | None, compiles: bool = True) -> dict[str, Any]:
    """Arm → µs on the GPU and per call, or a note why it could not run. Raises TargetError when TIDE's scores are wrong: its
    time would mean nothing."""
    given = RouterTensors.random(problem)
    tide = tide_arm(library, given)
    check_scores(given, tide)
    others: dict[str, Callable[[], Work]] = {
        "eager": lambda: torch_arm(given, compiled=False),
    }
    if compiles:
        others["compile"] = lambda: torch_arm(given, compiled=True)
    if predecessor is not None:
        others["predecessor"] = lambda: predecessor_arm(predecessor, given, library.architecture.name)
    return {"tide": timed(tide)} | {name: _timed_or_note(make) for name, make in others.items()}


def timed(work: Work) -> dict[str, float]:
    return {"gpu_us": gpu_time(work), "call_us": call_time(work)}


def _timed_or_note(make: Callable[[], Work]) -> dict[str, Any]:
    """torch.compile needs a C compiler on the machine; the other arms do not."""
    try:
        return timed(make())
    except Exception as error:  # torch's own classes; a baseline that cannot run is a gap in the table
        return {"note": f"{type(error).__name__}: {error}".splitlines()[0]}


def check_scores(given: RouterTensors, work: Work) -> None:
    """Raises TargetError unless ``work`` writes the scores that float64 gives."""
    work()
    expected = given.scores()
    error = ((given.tensors["score"].double() - expected).abs() / expected).max().item()
    if not error <= _SCORE_TOLERANCE:
        raise TargetError(f"{given.problem.name}: the scores are off by {error:.2g} relative; nothing is timed")


_KIT_PROBLEMS = ((4096, 1), (4096, 8), (2048, 1), (8192, 1), (4096, 64))  # hidden size and rows, in fp16
_COMPILED = _KIT_PROBLEMS[:2]  # compiling takes longer than all else


def kit_cases(bench: Bench, argument: str) -> Iterator[KitCase]:
    yield KitCase("floors", lambda: asdict(_floors()), lambda: {"cubin_bytes": len(compile_cubin(NOTHING, bench.arch))})
    for compiles in (False, True):
        for hidden_size, rows in _COMPILED if compiles else _KIT_PROBLEMS:
            problem = RouterProblem("f16", hidden_size, rows)
            name = f"{problem.name}_compile" if compiles else problem.name
            yield KitCase(name, partial(_kit_row, problem, compiles), partial(_kit_prepared, problem, compiles, bench))


def _kit_row(problem: RouterProblem, compiles: bool) -> Figures:
    arms = measure(problem, _library(), None, compiles)
    times = {f"{name}_{time}": arm[time] for name, arm in arms.items() for time in ("gpu_us", "call_us") if time in arm}
    notes = {f"{name}_note": arm["note"] for name, arm in arms.items() if "note" in arm}
    ratios = {f"vs_{name}": arm["gpu_us"] / arms["tide"]["gpu_us"] for name, arm in arms.items() if "gpu_us" in arm}
    row = row_of(problem, _floors(), arms)
    return times | notes | ratios | {name: row[name] for name in ("problem", "bytes", "floor_us", "floor_share", "gb_s")}


@cache
def _floors() -> Floors:
    CudaDriver()
    return measure_floors()


@cache
def _library() -> KernelLibrary:
    return KernelLibrary(CudaDriver())


def _kit_prepared(problem: RouterProblem, compiles: bool, bench: Bench) -> Figures:
    """TIDE's launch, and torch's arm where it takes no time on a processor: run, or traced by dynamo."""
    gpu = AbsentGpu(bench.compute)
    prepare_launch(problem, KernelLibrary(gpu), gpu)
    if problem.rows == 1:
        with torch.no_grad():
            torch_arm(RouterTensors.random(problem, device="cpu"), compiles, backend="eager")()
    return {"bytes": problem.bytes}


def main(
    predecessor: Annotated[Path | None, typer.Option(help="A checkout of RightNow-AI/TIDE 0.2.1.")] = None,
    only: Annotated[str, typer.Option(help="Problems whose name contains this text, as `f16_h4096_n1`.")] = "",
    arch: Annotated[str, typer.Option(help="Without a GPU: the architecture to prepare launches for.")] = "sm_90",
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Time the router kernel."""
    some = [problem for problem in problems() if only in problem.name]
    try:
        driver = CudaDriver()
        if not torch.cuda.is_available():
            raise TargetError(f"torch {torch.__version__} sees no GPU; install a build for CUDA")
    except TargetError as reason:
        say_not_run(reason, prepare_without_gpu(some, arch, predecessor))
    library, floors = KernelLibrary(driver), measure_floors()
    report = gpu_report("router_kernel", driver.name, predecessor=str(predecessor), only=only)
    report.add("bandwidth_gb_s", floors.bandwidth / 1e3)
    report.add("empty_launch_us", floors.launch_us)
    for problem in some:
        record(report, problem, floors, measure(problem, library, predecessor))
    Console(width=140).print(results_table(report))
    report.finish(json)


def row_of(problem: RouterProblem, floors: Floors, arms: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Times, share of the binding floor, achieved bandwidth."""
    tide = arms["tide"]["gpu_us"]
    share, bandwidth = floors.binding_us(problem) / tide, problem.bytes / tide / 1e3
    row = {"problem": problem.name, "bytes": problem.bytes, "arms": arms}
    return row | {"floor_us": floors.binding_us(problem), "floor_share": share, "gb_s": bandwidth}


def record(report: Report, problem: RouterProblem, floors: Floors, arms: Mapping[str, Mapping[str, Any]]) -> None:
    """A row, and RESULT lines: times, ratios to TIDE's on the GPU, share of the binding floor."""
    row, tide = row_of(problem, floors, arms), arms["tide"]["gpu_us"]
    report.rows.append(row)
    report.add(f"{problem.name}_floor_share", row["floor_share"])
    for name, times in arms.items():
        if "note" in times:
            print(f"{problem.name}: {name} could not run: {times['note']}")
            continue
        report.add(f"{problem.name}_{name}_us", times["gpu_us"])
        report.add(f"{problem.name}_{name}_call_us", times["call_us"])
        if name != "tide":
            report.add(f"{problem.name}_vs_{name}", times["gpu_us"] / tide)


def results_table(report: Report) -> Table:
    names = list(report.rows[0]["arms"]) if report.rows else []
    table = Table("problem", "floor µs", "of floor", "GB/s", *(f"{name} µs (call)" for name in names), title="exit_router")
    for row in report.rows:
        times = ("–" if "note" in arm else f"{arm['gpu_us']:.1f} ({arm['call_us']:.1f})" for arm in row["arms"].values())
        table.add_row(row["problem"], f"{row['floor_us']:.1f}", f"{row['floor_share']:.0%}", f"{row['gb_s']:.0f}", *times)
    return table


def _plans_table(some: Sequence[RouterProblem]) -> Table:
    table = Table("problem", "blocks", "blocks of the second launch", "bytes to move")
    for problem in some:
        plan = problem.plan
        blocks = "×".join(map(str, plan.project.grid))
        table.add_row(problem.name, blocks, str(plan.score.grid[0]), f"{problem.bytes:,}")
    return table


if __name__ == "__main__":
    typer.run(main)
