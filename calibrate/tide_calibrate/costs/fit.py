"""Fit a linear cost model of launches, layers and logits to the times of segments of different depth.

    segment of n layers, s tokens   launch + n * layer(s)
    last segment                    launch + n * layer(s) + logits(s)
    graph ``head``                  launch + logits(s)
    graph ``uncut``                 launch + L * layer(s) + logits(s), if the target has it

All sizes s are fitted together: a launch is independent of s, and layers and logits are non-decreasing in s. Fitted size by
size, noise of a tenth of a millisecond enters launches and layers with opposite signs and decides where exits are placed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import StepCost
from tide_runtime.bundle.manifest import HEAD, UNCUT, Manifest
from tide_runtime.errors import CalibrationError

from tide_calibrate.costs.host_overhead import HostTimes

ROUTER_WIDTH = 128  # hidden width of the MLP router, and the maximum rank of a translator


def fit_steps(
    manifest: Manifest, batch_size: int, graph_ms: Mapping[int, Mapping[str, float]], host: HostTimes
) -> list[StepCost]:
    """Fit the costs of steps of ``batch_size`` sequences.

    Args:
        graph_ms: tokens per sequence → ms of every graph.
        host: host times at the same batch size.

    Raises CalibrationError when the fitted time of a layer is not positive.
    """
    sizes = sorted(graph_ms)
    depths = [segment.layers[1] - segment.layers[0] for segment in manifest.segments if segment.layers]
    segments = [segment.name for segment in manifest.segments]
    uncut = UNCUT in graph_ms[sizes[0]]
    layers = {**dict(zip(segments, depths, strict=True)), HEAD: 0} | ({UNCUT: manifest.model.num_layers} if uncut else {})
    times = np.array([[graph_ms[size][name] for name in layers] for size in sizes])
    launch, layer, logits = _least_squares(times, list(layers.values()), [name not in segments[:-1] for name in layers])
    if layer[0] <= 0:
        raise CalibrationError("deeper segments took no longer than shallow ones; measure again when the machine is quiet")
    exits = np.array([_exit_ms(manifest, graph_ms[size], launch, float(ms)) for size, ms in zip(sizes, layer, strict=True)])
    extra = max(0.0, host.depth - host.full)
    return [
        StepCost(batch_size, size, launch, float(n), launch + float(m), float(e), host.full, extra)
        for size, n, m, e in zip(sizes, layer, logits, _isotonic(exits), strict=True)
    ]


def _least_squares(
    times: NDArray[np.float64], layers: Sequence[int], has_logits: Sequence[bool]
) -> tuple[float, NDArray[np.float64], NDArray[np.float64]]:
    """Fit one launch time, and the times of a layer and of the logits at each size, minimising relative errors.

    Args:
        times: [sizes, graphs].
        layers: [graphs], number of layers.
        has_logits: [graphs], whether the graph computes logits.
    """
    count, graphs = times.shape
    equations = np.zeros((count, graphs, 1 + 2 * count))
    equations[:, :, 0] = 1
    for size in range(count):
        equations[size, :, 1 + size] = layers
        equations[size, :, 1 + count + size] = has_logits
    scaled = (equations / times[:, :, None]).reshape(-1, 1 + 2 * count)
    solution = np.linalg.lstsq(scaled, np.ones(len(scaled)), rcond=None)[0]
    if solution[0] < 0:  # noise: fit again without launches
        solution = np.concatenate([[0.0], np.linalg.lstsq(scaled[:, 1:], np.ones(len(scaled)), rcond=None)[0]])
    return float(solution[0]), _isotonic(solution[1 : 1 + count]), _isotonic(np.maximum(solution[1 + count :], 0.0))


def _isotonic(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Isotonic regression: the nearest non-decreasing values, by pooling adjacent violators (Barlow et al. 1972)."""
    pools: list[list[float]] = []  # sum and count of each pool
    for value in values.tolist():
        pools.append([value, 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1] = [pools[-1][0] + total, pools[-1][1] + count]
    return np.concatenate([np.full(int(count), total / count) for total, count in pools])


def _exit_ms(manifest: Manifest, graph_ms: Mapping[str, float], launch: float, layer: float) -> float:
    """Time of a router's or translator's graph, estimated from its number of weights when the bundle has none to time."""
    exits = [ms for name, ms in graph_ms.items() if name.startswith("exit_")]
    return float(np.mean(exits)) if exits else launch + layer * _exit_share(manifest)


def _exit_share(manifest: Manifest) -> float:
    """Weights of a router and a translator over those of a layer."""
    last = manifest.segments[-1]
    assert last.layers is not None
    layer = last.parameters / (last.layers[1] - last.layers[0])
    return min(1.0, 3 * ROUTER_WIDTH * manifest.model.hidden_size / layer) if layer else 1.0
