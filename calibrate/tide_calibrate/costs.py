"""What a step costs on this machine: graphs of a bundle timed at several shapes, and launches told from layers (`cost_fit`).

The bundle needs segments of different depth (`measuring_checkpoints`), or launches cannot be told from layers.
"""

from __future__ import annotations

import itertools
import os
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from tide_runtime import Engine, EngineOptions
from tide_runtime.backends.base import Backend
from tide_runtime.backends.threads import ThreadOptions
from tide_runtime.calibration import CostTable, StepCost
from tide_runtime.errors import CalibrationError
from tide_runtime.manifest import UNCUT, Manifest

from tide_calibrate.cost_fit import fit_steps
from tide_calibrate.host_time import measure_host_times
from tide_calibrate.warm_runs import measure_warm_shares

Shape = tuple[int, int]  # rows, tokens of each
Clock = Callable[[], float]  # seconds

START = 96  # cache slots filled before the timed steps, where the cache has that many: a short chat
WARM_UPS = 2
LEAST_ROUNDS = 3
QUANTILE = 0.25  # of a graph's times over the rounds: whatever else runs on the machine only ever adds


def measuring_checkpoints(num_layers: int) -> list[int]:
    """Cuts that suit `measure_costs`: segments of unequal depth, the first a short one. A model has 3 layers at least."""
    shares = (1 / 12, 1 / 4, 1 / 2, 3 / 4) if num_layers >= 8 else (1 / 12,)
    return sorted({max(1, round(num_layers * share)) for share in shares})


def measure_costs(
    bundle: str | Path,
    target: str = "cpu",
    rows: Iterable[int] = (1, 4, 8),
    seqs: Iterable[int] = (1, 2, 4, 8, 16),
    threads: ThreadOptions | None = None,
    rounds: int = 14,
    budget_s: float = 30.0,
) -> CostTable:
    """Time the graphs of ``bundle`` at every shape of ``rows`` x ``seqs``.

    Args:
        threads: as the runtime will have them; the commands run with ``ThreadOptions(shared=True)``.
        rounds: passes over all shapes, interleaved so that a slow moment of the machine meets all of them.
        budget_s: no new pass starts after this many seconds (after three passes).

    ``unsplit_ms`` follows from the fit: launch + L layers + the head without a launch of its own + host.
    Raises CalibrationError when all segments have the same depth, or the timings make no sense.
    """
    engine = Engine.load(bundle, EngineOptions(target=target, policy="full", threads=threads or ThreadOptions()))
    manifest = engine.manifest
    check_depths(manifest)
    shapes = [(r, s) for r in sorted(set(rows)) for s in sorted(set(seqs)) if s < manifest.max_seq_len]
    times = time_graphs(engine.backend, manifest, shapes, rounds, budget_s)
    warm = measure_warm_shares(engine.backend, manifest)
    host = measure_host_times(engine, sorted({r for r, _ in shapes}))
    steps = [
        step
        for r, outside in host.items()
        for step in fit_steps(manifest, r, {s: times[r, s] for count, s in shapes if count == r}, outside)
    ]
    return CostTable(target, _machine(), unsplit_ms(steps, manifest.model.num_layers), steps, warm)


def time_graphs(
    backend: Backend,
    manifest: Manifest,
    shapes: Iterable[Shape],
    rounds: int,
    budget_s: float,
    clock: Clock = time.perf_counter,
) -> dict[Shape, dict[str, float]]:
    """ms of every graph at every shape, lower quartile over the rounds.

    Graphs run in the order of a step, and those of an uncut one apart, so each finds the CPU's caches as it will in use.
    """
    shapes = list(shapes)
    slots = backend.slots(max(rows for rows, _ in shapes))
    orders = [[graph.name for graph in manifest.graphs], *([[UNCUT]] if UNCUT in slots.every_layer else [])]
    samples: dict[Shape, dict[str, list[float]]] = {shape: {name: [] for order in orders for name in order} for shape in shapes}
    begin = clock()
    for turn in range(rounds):
        if turn >= LEAST_ROUNDS and clock() - begin > budget_s:
            break
        for shape in shapes:
            rows, seq = shape
            step = slots.step(0, [seq] * rows, [seq] * rows)
            step.place([min(START, manifest.max_seq_len - seq)] * rows)
            for order, repeat in itertools.product(orders, range(WARM_UPS + 1)):
                for name in order:
                    start = clock()
                    step.run(name)
                    if repeat == WARM_UPS:
                        samples[shape][name].append((clock() - start) * 1e3)
    return {
        shape: {name: float(np.quantile(times, QUANTILE)) for name, times in by_name.items()}
        for shape, by_name in samples.items()
    }


def check_depths(manifest: Manifest) -> None:
    """Raise CalibrationError unless two segments differ in depth."""
    depths = {segment.layers[1] - segment.layers[0] for segment in manifest.segments if segment.layers}
    if len(depths) < 2:
        advice = ",".join(str(cut) for cut in measuring_checkpoints(manifest.model.num_layers))
        raise CalibrationError(
            f"all segments of the bundle have {min(depths)} layers, so a launch's time cannot be told from a layer's; "
            f"measure on a bundle with segments of different depth, for example tide-export --checkpoints {advice}"
        )


def unsplit_ms(steps: Iterable[StepCost], num_layers: int) -> float:
    """One decode step of the uncut model, one row. The head's time holds a launch, which serves for the whole graph."""
    one = next((step for step in steps if (step.rows, step.seq) == (1, 1)), None)
    if one is None:
        raise CalibrationError("one row of one token was not measured; include 1 in rows and in seqs")
    return num_layers * one.layer_ms + max(one.head_ms, one.launch_ms) + one.host_ms


def _machine() -> str:
    cpu = platform.processor() or platform.machine()
    return f"{platform.system()} {cpu}, {len(os.sched_getaffinity(0))} cores"
