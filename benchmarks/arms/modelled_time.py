"""What launches should have taken, by the calibration's own costs: free of the clock's noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from typing import NamedTuple

from tide_runtime.bundle.manifest import HEAD, UNCUT, Manifest
from tide_runtime.costs.cost_model import CostModel


class Launch(NamedTuple):
    """``graph`` on so many ``tokens`` of ``rows`` sequences, ``longest`` of one of them."""

    graph: str
    rows: int
    tokens: int
    longest: int


class LaunchCounts:
    """An engine's launches by shape: the ``observer`` of `Engine.with_options`."""

    def __init__(self) -> None:
        self.counts: Counter[Launch] = Counter()

    def launched(self, graph: str, rows: int, tokens: int, longest: int, seconds: float) -> None:
        self.counts[Launch(graph, rows, tokens, longest)] += 1


def layers_of(manifest: Manifest) -> Counter[str]:
    """Graph → decoder layers it runs, shallow segments first."""
    layers = Counter({s.name: s.layers[1] - s.layers[0] for s in manifest.segments if s.layers is not None})
    layers[UNCUT] = manifest.model.num_layers
    return layers


def modelled_ms(launches: Mapping[Launch, int], layers: Mapping[str, int], costs: CostModel) -> float:
    """Milliseconds of ``launches`` together.

    Args:
        layers: as `layers_of` gives them.
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
