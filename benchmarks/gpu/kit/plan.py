"""The stages, ordered by what teaches most about code that has never run on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """``module``: of `benchmarks.gpu.kit.stages`. ``limit``: seconds that it may take in one call."""

    number: int
    module: str
    title: str
    limit: float

    @property
    def file_name(self) -> str:
        return f"stage{self.number}_{self.module}.json"


STAGES = (
    Stage(0, "machine", "facts of the machine", 90),
    Stage(1, "first_graphs", "one conditional node; which nodes a captured cuBLAS call leaves", 90),
    Stage(2, "kernels", "every kernel's cases", 240),
    Stage(3, "loop_graphs", "conditional graphs of stub segments, driven by the device and by the host", 120),
    Stage(4, "sanitizers", "the kernels under compute-sanitizer", 300),
    Stage(5, "router_times", "the router's kernel against its floors, torch eager and torch.compile", 300),
    Stage(6, "decode", "ONNX Runtime's CUDA provider: identity, and decode speed against eager, compiled and unsplit", 510),
    Stage(7, "loops", "decode loops of real bundles on the device", 180),
)


def chosen(numbers: str) -> list[Stage]:
    """Stages by their comma-separated ``numbers``. Raises ValueError for one that does not exist."""
    wanted = [int(number) for number in numbers.split(",")]
    unknown = sorted(set(wanted) - {stage.number for stage in STAGES})
    if unknown:
        raise ValueError(f"there is no stage {unknown[0]}; choose from 0 to {STAGES[-1].number}")
    return [stage for stage in STAGES if stage.number in wanted]


def numbers(stages: Iterable[Stage]) -> str:
    return ",".join(str(stage.number) for stage in stages)
