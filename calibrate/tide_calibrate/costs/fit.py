"""Launches told from layers: times of segments of different depth, at several numbers of tokens, explained together.

    segment of n layers, s tokens   launch + n * layer(s)
    the last one                    as much, and logits(s)
    the graph ``head``              launch + logits(s)
    the graph ``uncut``             launch + L * layer(s) + logits(s), where the target has it

A launch costs what it costs whatever the tokens, and layers and logits never get cheaper with more of them. Each size fitted
for itself would put noise of a tenth of a millisecond into launches and layers with opposite signs, and the exits wherever that
points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import StepCost
from tide_runtime.bundle.manifest import HEAD, UNCUT, Manifest
from tide_runtime.errors import CalibrationError

from tide_calibrate.costs.host_overhead import HostTimes

ROUTER_WIDTH = 128  # of the MLP router; a translator's rank is at most the same


def fit_steps(manifest: Manifest, rows: int, graph_ms: Mapping[int, Mapping[str, float]], host: HostTimes) -> list[StepCost]:
    """The costs of steps of ``rows`` rows.

    Args:
        graph_ms: tokens a row → ms of every graph.
        host: of as many rows.

    Raises CalibrationError when layers seem to take no time.
    """
    sizes = sorted(graph_ms)
    depths = [segment.layers[1] - segment.layers[0] for segment in manifest.segments if segment.layers]
    segments, uncut = [segment.name for segment in manifest.segments], UNCUT in graph_ms[sizes[0]]
    layers = {**dict(zip(segments, depths, strict=True)), HEAD: 0} | ({UNCUT: manifest.model.num_layers} if uncut else {})
    times = np.array([[graph_ms[size][name] for name in layers] for size in sizes])
    launch, layer, logits = _explain(times, list(layers.values()), [name not in segments[:-1] for name in layers])
    if layer[0] <= 0:
        raise CalibrationError("deeper segments took no longer than shallow ones; measure again when the machine is quiet")
    exits = np.array([_exit_ms(manifest, graph_ms[size], launch, float(one)) for size, one in zip(sizes, layer, strict=True)])
    asks, deep = (max(0.0, turn - host.plain) for turn in (host.ask, host.deep))
    return [
        StepCost(rows, size, launch, float(n), launch + float(m), float(e), host.plain, asks, deep)
        for size, n, m, e in zip(sizes, layer, logits, _rising(exits), strict=True)
    ]


def _explain(
    times: NDArray[np.float64], layers: Sequence[int], ends: Sequence[bool]
) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
    """One launch, and a layer and the logits at each size, by least squares of relative errors.

    Args:
        times: [sizes, graphs].
        layers: of each graph.
        ends: [graphs], whether it gives logits.
    """
    count, graphs = times.shape
    equations = np.zeros((count, graphs, 1 + 2 * count))
    equations[:, :, 0] = 1
    for size in range(count):
        equations[size, :, 1 + size] = layers
        equations[size, :, 1 + count + size] = ends
    scaled = (equations / times[:, :, None]).reshape(-1, 1 + 2 * count)
    solution = np.linalg.lstsq(scaled, np.ones(len(scaled)), rcond=None)[0]
    if solution[0] < 0:  # noise; without launches then
        solution = np.concatenate([[0.0], np.linalg.lstsq(scaled[:, 1:], np.ones(len(scaled)), rcond=None)[0]])
    return float(solution[0]), _rising(solution[1 : 1 + count]), _rising(np.maximum(solution[1 + count :], 0.0))


def _rising(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """The nearest values that never fall: pool adjacent violators (Barlow et al. 1972)."""
    pools: list[list[float]] = []  # sum, count
    for value in values.tolist():
        pools.append([value, 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1] = [pools[-1][0] + total, pools[-1][1] + count]
    return np.concatenate([np.full(int(count), total / count) for total, count in pools])


def _exit_ms(manifest: Manifest, graph_ms: Mapping[str, float], launch: float, layer: float) -> float:
    """Of a router's or translator's graph; from its share of a layer's weights when the bundle has none to time."""
    exits = [ms for name, ms in graph_ms.items() if name.startswith("exit_")]
    return float(np.mean(exits)) if exits else launch + layer * _exit_share(manifest)


def _exit_share(manifest: Manifest) -> float:
    last = manifest.segments[-1]
    assert last.layers is not None
    layer = last.parameters / (last.layers[1] - last.layers[0])
    return min(1.0, 3 * ROUTER_WIDTH * manifest.model.hidden_size / layer) if layer else 1.0
