"""What a set of launches should have taken, by the calibration's own costs: the theory that measured times are held against."""

from __future__ import annotations

from collections.abc import Container, Mapping

from tide_runtime.bundle.manifest import HEAD, UNCUT
from tide_runtime.costs.cost_model import CostModel

from benchmarks.arms.launch_log import Launch


def modelled_ms(launches: Mapping[Launch, int], layers: Mapping[str, int], costs: CostModel) -> float:
    """Milliseconds of ``launches`` together.

    Args:
        layers: graph name → decoder layers it runs, shallow segments first.
        costs: of a bundle with a measured cost table (`tide_runtime.bundle.calibration.StepCost` says what its parts are).

    Each launch that gives logits stands for one turn of the runtime's loop, whose time it is charged with. Which launches found
    their weights in the processor's caches a count of them does not tell, so none are taken to.
    """
    segments = {graph: depth for graph, depth in layers.items() if depth and graph != UNCUT}
    ends, every = {UNCUT, [*segments][-1]}, sum(segments.values())
    return sum(count * _launch_ms(launch, layers, ends, every, costs) for launch, count in launches.items())


def _launch_ms(launch: Launch, layers: Mapping[str, int], ends: Container[str], every: int, costs: CostModel) -> float:
    graph, rows, tokens, longest = launch
    cost = costs.step(rows, tokens, longest)
    if graph == HEAD:
        return cost.head_ms + cost.host_ms + cost.ask_extra_ms
    if graph in costs.fills:
        return costs.fill(tokens, costs.fills[graph])
    if not layers[graph]:
        return cost.exit_ms
    ms = cost.launch_ms + layers[graph] * cost.layer_ms
    if graph not in ends:
        return ms
    plain = layers[graph] == every and tokens == rows
    return ms + cost.logits_ms + cost.host_ms + (0.0 if plain else cost.deep_extra_ms)
