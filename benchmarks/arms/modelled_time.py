"""What launches should have taken, by the calibration's own costs: free of the clock's noise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from typing import NamedTuple

from tide_runtime.bundle.manifest import HEAD, UNCUT, Manifest
from tide_runtime.costs.cost_model import DEPTH_TURN, EXIT_GRAPH, FULL_TURN, LM_HEAD, CostModel, Graph
from tide_runtime.costs.cost_model import Launch as PricedLaunch


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

    Each launch that gives logits stands for one turn of the runtime's loop, whose time it is charged with.
    """
    segments = {graph: depth for graph, depth in layers.items() if depth and graph != UNCUT}
    ends, every = {UNCUT, [*segments][-1]}, sum(segments.values())
    return costs.price(
        PricedLaunch(part, launch.rows, launch.tokens, launch.longest, count)
        for launch, count in launches.items()
        for part in _parts(launch, layers, ends, every)
    )


def _parts(launch: Launch, layers: Mapping[str, int], ends: Container[str], every: int) -> list[Graph]:
    """What the cost model charges for ``launch``: its graph, and a turn of the loop where it gives logits."""
    if launch.graph == HEAD:
        return [LM_HEAD, DEPTH_TURN]
    if not layers[launch.graph]:
        return [EXIT_GRAPH]
    if launch.graph not in ends:
        return [Graph(layers=layers[launch.graph])]
    plain = layers[launch.graph] == every and launch.tokens == launch.rows
    return [Graph(layers=layers[launch.graph], logits=1.0), FULL_TURN if plain else DEPTH_TURN]
