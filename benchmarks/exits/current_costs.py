"""A calibration's step costs as they would be if they were measured now: the speed of a shared machine changes within minutes."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from tide_calibrate.costs.measure import unsplit_ms
from tide_runtime.backends.onnxruntime.cpu import OnnxRuntimeBackend
from tide_runtime.backends.pass_costs import measure_pass_costs
from tide_runtime.bundle.calibration import CostTable, StepCost
from tide_runtime.costs.cost_model import StepCurve, StepTable


def pass_costs_now(backend: OnnxRuntimeBackend) -> CostTable:
    """The runtime's table of passes through all layers, measured anew."""
    return measure_pass_costs(backend.context, backend.manifest.max_seq_len, "cpu", platform.node())


def current_costs(costs: CostTable, passes: Sequence[CostTable], num_layers: int) -> CostTable:
    """``costs`` of one sequence, its graphs scaled at each size so that a pass takes the mean of ``passes``."""
    tables, steps = [StepTable.of(table) for table in passes], [step for step in costs.steps if step.rows == 1]
    then = StepCurve.of(costs, int(max(step.seq for step in steps))).whole(num_layers)
    now = [fmean(table.step(1, int(step.seq)).layer_ms for table in tables) for step in steps]
    scaled = [_scaled(step, ms / then[int(step.seq)]) for step, ms in zip(steps, now, strict=True)]
    return replace(costs, steps=scaled, unsplit_ms=unsplit_ms(scaled, num_layers))


def _scaled(step: StepCost, factor: float) -> StepCost:
    """A copy of ``step`` whose graphs take ``factor`` times as long. The host's times do not change."""
    graphs = ("launch_ms", "layer_ms", "head_ms", "exit_ms")
    return replace(step, **{name: factor * getattr(step, name) for name in graphs})
