"""The stages of the short plan, what teaches most first; the stages of one row run at the same time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A process that runs the cases of a module.

    Args:
        module: its ``kit_cases(bench, argument)`` yields the cases.
        seconds: what it is expected to take on an H100.
        limit: seconds after which it is stopped.
        case_limit: seconds after which a case is stopped, and the others go on in a new process.
    """

    name: str
    module: str
    argument: str
    seconds: float
    limit: float
    case_limit: float = 30.0


MACHINE = (
    Stage("machine", "benchmarks.gpu.machine", "", 20, 60, 45),
    Stage("imports", "benchmarks.gpu.machine", "imports", 20, 60, 60),
)
CONDITIONS = (
    Stage("conditional", "benchmarks.gpu.conditional_kernel", "", 4, 20),
    *(Stage(f"cublas_{arm}", "benchmarks.gpu.cublas_capture", arm, 8, 30) for arm in ("default", "none", "small", "own")),
)
GRAPHS = Stage("graphs", "benchmarks.gpu.graph_cases", "", 35, 60, 15)
LOOP_KERNELS = Stage("loop_kernels", "benchmarks.gpu.kernel_cases", "loop 3", 25, 60, 15)
ROUTER_KERNELS = Stage("router_kernels", "benchmarks.gpu.kernel_cases", "exit_router 3", 25, 60, 15)
CAPTURES = Stage("torch_capture", "benchmarks.gpu.torch_capture", "demo_fp32 demo_fp16 demo_int4", 35, 60, 40)
CONDITION_COSTS = Stage("condition_costs", "benchmarks.gpu.condition_costs", "", 8, 25)
PASSES = Stage("passes", "benchmarks.gpu.pass_costs", "", 30, 60, 40)
SEGMENTS = Stage("torch_segments", "benchmarks.gpu.torch_segments", "", 20, 60, 40)
DEMO_FP32, DEMO_FP16 = (
    Stage("demo_fp32", "benchmarks.gpu.demo_decode", "fp32", 45, 80, 60),
    Stage("demo_fp16", "benchmarks.gpu.demo_decode", "fp16", 25, 60, 40),
)
ONE_B = tuple(
    Stage(f"1b_{dtype}_b{rows}", "benchmarks.gpu.big_decode", f"{dtype} {rows}", seconds, limit, 75)
    for dtype, rows, seconds, limit in (("fp16", 1, 70, 120), ("fp16", 8, 30, 70), ("int4", 1, 35, 70))
)
ROUTER = Stage("router", "benchmarks.gpu.router_kernel", "", 40, 60, 40)
SANITIZERS = tuple(Stage(tool, "benchmarks.gpu.sanitize", tool, 55, 75, 75) for tool in ("memcheck", "racecheck"))

Row = tuple[Stage, ...]
CALLS: dict[int, tuple[Row, ...]] = {
    1: (
        MACHINE,
        CONDITIONS,
        (GRAPHS, LOOP_KERNELS, ROUTER_KERNELS, CAPTURES),
        (CONDITION_COSTS,),
        (PASSES,),
        (SEGMENTS,),
        (DEMO_FP32,),
        (DEMO_FP16,),
        *((stage,) for stage in ONE_B),
        (ROUTER,),
        SANITIZERS,
    ),
    2: ((CAPTURES, SEGMENTS), *((stage,) for stage in ONE_B[::2])),
}
SECONDS = {1: 480.0, 2: 140.0}  # of a call on the machine
STAGES = {stage.name: stage for row in CALLS[1] for stage in row}


def chosen(names: str) -> tuple[Row, ...]:
    """The rows of all stages whose name is, or begins with, one of the comma-separated ``names``. Raises ValueError."""
    wanted = names.split(",")
    for name in wanted:
        if not any(stage.startswith(name) for stage in STAGES):
            raise ValueError(f"there is no stage {name!r}; choose from: {', '.join(STAGES)}")
    rows = (tuple(stage for stage in row if stage.name.startswith(tuple(wanted))) for row in CALLS[1])
    return tuple(row for row in rows if row)


def expected_seconds(rows: tuple[Row, ...]) -> float:
    return sum(max(stage.seconds for stage in row) for row in rows)
