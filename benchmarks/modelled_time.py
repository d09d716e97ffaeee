"""What a set of launches should have taken, by the calibration's own costs: the theory that measured times are held against."""

from __future__ import annotations

from collections.abc import Mapping

from tide_runtime.step_costs import StepCosts

from benchmarks.launch_log import Launch
from benchmarks.unsplit_arm import GRAPH as UNSPLIT


def modelled_ms(launches: Mapping[Launch, int], layers: Mapping[str, int], costs: StepCosts) -> float:
    """Milliseconds of ``launches`` together.

    Args:
        layers: graph name → decoder layers it runs.
        costs: of a bundle with a measured cost table (`tide_runtime.calibration.StepCost` says what its parts are).

    Each run of the head stands for one turn of the runtime's loop, whose time it is charged with; the uncut graph holds the
    head, and the head's launch is its own.
    """
    return sum(count * _launch_ms(launch, layers, costs) for launch, count in launches.items())


def _launch_ms(launch: Launch, layers: Mapping[str, int], costs: StepCosts) -> float:
    graph, rows, seq = launch
    cost = costs.step(rows, seq)
    run = layers[graph] * cost.layer_ms
    if graph == UNSPLIT:
        return run + max(cost.head_ms, cost.launch_ms) + cost.host_ms
    if graph == "head":
        return cost.head_ms + cost.host_ms
    return cost.launch_ms + run if layers[graph] else cost.exit_ms
