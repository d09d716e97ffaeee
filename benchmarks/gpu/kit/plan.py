"""The stages of the short plan, what teaches most first; the stages of one row run at the same time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A process that runs the cases of a module.

    Args:
        module: seen from `benchmarks.gpu`; its ``kit_cases(bench, argument)`` yields the cases.
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


Row = tuple[Stage, ...]
PLAN: tuple[Row, ...] = (
    (Stage("machine", ".machine", "", 4, 60, 45), Stage("imports", ".machine", "imports", 20, 60, 60)),
    (
        Stage("growing_memory", ".growing_memory", "", 8, 30),
        Stage("loop_kernels", ".kernel_cases", "loop 3", 3, 60, 15),
        Stage("router_kernels", ".kernel_cases", "exit_router 3", 4, 60, 15),
        *(Stage(tool, ".sanitize", tool, 7, 75, 75) for tool in ("memcheck", "racecheck")),
    ),
    (Stage("torch_kernels", ".torch_kernels", "", 45, 90, 30),),
    (Stage("1b_int4_b1", ".big_decode", "int4 1", 35, 70, 60),),
    (Stage("demo_int4", ".demo_decode", "int4", 50, 80, 60),),
    (Stage("demo_fp32", ".demo_decode", "fp32", 70, 100, 60),),
    (Stage("demo_fp16", ".demo_decode", "fp16", 54, 80, 40),),
    (Stage("1b_fp16_b1", ".big_decode", "fp16 1", 54, 120, 75),),
    (Stage("1b_fp16_b8", ".big_decode", "fp16 8", 29, 70, 60),),
)
STAGES = {stage.name: stage for row in PLAN for stage in row}
SECONDS = {1: 480.0, 2: 140.0}  # of a call on the machine


def chosen(names: str) -> tuple[Row, ...]:
    """The rows of all stages whose name is, or begins with, one of the comma-separated ``names``. Raises ValueError."""
    wanted = names.split(",")
    for name in wanted:
        if not any(stage.startswith(name) for stage in STAGES):
            raise ValueError(f"there is no stage {name!r}; choose from: {', '.join(STAGES)}")
    rows = (tuple(stage for stage in row if stage.name.startswith(tuple(wanted))) for row in PLAN)
    return tuple(row for row in rows if row)


CALLS = {1: PLAN, 2: chosen("torch_kernels,1b_fp16_b1,1b_int4")}


def expected_seconds(rows: tuple[Row, ...]) -> float:
    return sum(max(stage.seconds for stage in row) for row in rows)
