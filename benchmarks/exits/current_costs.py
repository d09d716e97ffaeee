"""A calibration's step costs as they would be if they were measured now: the speed of a shared machine changes within minutes."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace

from tide_calibrate.costs.measure import unsplit_ms
from tide_runtime.backends.onnxruntime.cpu import OnnxRuntimeBackend
from tide_runtime.backends.pass_costs import measure_pass_costs
from tide_runtime.bundle.calibration import CostTable, StepCost
from tide_runtime.costs.cost_model import StepTable


def pass_costs_now(backend: OnnxRuntimeBackend) -> CostTable:
    """The runtime's table of passes through all layers, measured anew."""
    return measure_pass_costs(backend.context, backend.manifest.max_seq_len, "cpu", platform.node())


def current_costs(costs: CostTable, passes: Sequence[CostTable], num_layers: int) -> CostTable:
    """``costs`` of one sequence, its graphs scaled at each size so that a pass takes the mean of ``passes``."""
    tables = [StepTable.of(table) for table in passes]
    steps = []
    for step in costs.steps:
        if step.rows == 1:
            mean = sum(table.step(1, step.seq).layer_ms for table in tables) / len(tables)
            steps.append(_scaled(step, mean / _pass_ms(step, num_layers)))
    return replace(costs, steps=steps, unsplit_ms=unsplit_ms(steps, num_layers))


def _pass_ms(step: StepCost, num_layers: int) -> float:
    return num_layers * step.layer_ms + max(step.head_ms, step.launch_ms)


def _scaled(step: StepCost, factor: float) -> StepCost:
    """With the times of its graphs multiplied by ``factor``, and those of the host as they are."""
    graphs = ("launch_ms", "layer_ms", "head_ms", "exit_ms")
    return replace(step, **{name: factor * getattr(step, name) for name in graphs})
