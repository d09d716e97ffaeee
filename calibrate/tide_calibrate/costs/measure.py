"""Measure step costs on this machine: time a bundle's graphs at several shapes and fit the cost model (`fit_steps`).

The bundle needs segments of different depth (`measuring_checkpoints`); otherwise launches and layers cannot be separated. The
table is a JSON file: measured once per machine, and reused for calibrations of bundles for that machine.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tide_runtime import Engine, EngineOptions
from tide_runtime.backends.base import Backend, Step, wait_for
from tide_runtime.backends.onnxruntime.threads import ThreadOptions
from tide_runtime.bundle.calibration import CostTable, StepCost
from tide_runtime.bundle.manifest import UNCUT, Manifest
from tide_runtime.errors import CalibrationError

from tide_calibrate.costs.fit import fit_steps
from tide_calibrate.costs.host_overhead import measure_host_times

# Batch size → tokens per sequence. GEMMs become much slower from 7 tokens on, and again from 13 (see
# tide_runtime.backends.step_arrays.rounded_tokens).
SEQS = {1: (1, 2, 4, 6, 7, 12, 13, 24), 4: (1, 2, 4, 8, 16), 8: (1, 2, 4, 8)}
NUM_CACHED_TOKENS = 96  # KV cache slots filled before the timed steps, if the cache has that many: a short chat
MIN_ROUNDS = 3
# Passes until the processor's caches are in the state of continuous decoding; a slow model needs fewer than the maximum.
MIN_WARM_UPS = 2
MAX_WARM_UPS = 8
WARM_UP_S = 0.03
QUANTILE = 0.25  # quantile over the rounds of a graph's times

Clock = Callable[[], float]  # seconds
Counts = tuple[int, ...]  # tokens of each sequence


def measuring_checkpoints(num_layers: int) -> list[int]:
    """Cuts for `measure_costs`: segments of unequal depth, the first of them short. The model needs at least 3 layers."""
    shares = (1 / 12, 1 / 4, 1 / 2, 3 / 4) if num_layers >= 8 else (1 / 12,)
    return sorted({max(1, round(num_layers * share)) for share in shares})


def measure_costs(
    bundle: str | Path,
    target: str = "cpu",
    seqs: Mapping[int, Sequence[int]] | None = None,
    threads: ThreadOptions | None = None,
    rounds: int = 14,
    budget_s: float = 30.0,
) -> CostTable:
    """Time the graphs of ``bundle``.

    Args:
        seqs: batch sizes → tokens per sequence; None: `SEQS`.
        threads: thread options of the runtime; the commands run with ``ThreadOptions(shared=True)``.
        rounds: passes over all shapes, interleaved so that a temporary slowdown of the machine affects all of them.
        budget_s: no new pass starts after this many seconds (and at least three passes).

    ``unsplit_ms`` follows from the fit: launch + L layers + the head without a launch of its own + host.
    Raises CalibrationError when all segments have the same depth, or the fitted time of a layer is not positive.
    """
    engine = Engine.load(bundle, EngineOptions(target=target, policy="full", threads=threads or ThreadOptions()))
    manifest = engine.manifest
    check_depths(manifest)
    wanted = sorted((SEQS if seqs is None else seqs).items())
    sizes = {batch_size: [s for s in sorted(set(given)) if s < manifest.max_seq_len] for batch_size, given in wanted}
    sizes = {batch_size: even for batch_size, even in sizes.items() if even}
    shapes = [(s,) * batch_size for batch_size, even in sizes.items() for s in even]
    times = time_graphs(engine.backend, manifest, shapes, rounds, budget_s)
    host = measure_host_times(engine, sizes)
    steps = [
        step
        for batch_size, even in sizes.items()
        for step in fit_steps(manifest, batch_size, {s: undisturbed(times[(s,) * batch_size]) for s in even}, host[batch_size])
    ]
    return CostTable(target, _machine(engine.backend), unsplit_ms(steps, manifest.model.num_layers), steps)


def time_graphs(
    backend: Backend,
    manifest: Manifest,
    shapes: Iterable[Counts],
    rounds: int,
    budget_s: float,
    clock: Clock = time.perf_counter,
) -> dict[Counts, dict[str, NDArray[np.float64]]]:
    """Time every graph at every shape, in ms, [rounds] each.

    Graphs run in the order of a decode step, the uncut graph apart from the others, so the CPU's caches are as in decoding.
    """
    shapes = list(shapes)
    context = backend.context(max(len(counts) for counts in shapes))
    orders = [[graph.name for graph in manifest.graphs], *([[UNCUT]] if UNCUT in context.every_layer else [])]
    samples: dict[Counts, dict[str, list[float]]] = {shape: {name: [] for order in orders for name in order} for shape in shapes}
    begin = clock()
    for finished in range(rounds):
        if finished >= MIN_ROUNDS and clock() - begin > budget_s:
            break
        for counts in shapes:
            step = context.step(0, counts, counts)
            step.place([min(NUM_CACHED_TOKENS, manifest.max_seq_len - max(counts))] * len(counts))
            for order in orders:
                warm_up(partial(_run, backend, step, order), clock)
                for name in order:
                    start = clock()
                    _run(backend, step, [name])
                    samples[counts][name].append((clock() - start) * 1e3)
    return {shape: {name: np.array(times) for name, times in by_name.items()} for shape, by_name in samples.items()}


def undisturbed(times: Mapping[str, NDArray[np.float64]]) -> dict[str, float]:
    """Time in ms of each graph on an idle machine: a low quantile, because other load only adds time."""
    return {name: float(np.quantile(ms, QUANTILE)) for name, ms in times.items()}


def _run(backend: Backend, step: Step, graphs: Sequence[str]) -> None:
    for name in graphs:
        step.run(name)
    wait_for(backend)


def warm_up(run: Callable[[], object], clock: Clock) -> None:
    """Call ``run`` until the caches are as warm as in continuous decoding."""
    begin = clock()
    for passes in range(MAX_WARM_UPS):
        if passes >= MIN_WARM_UPS and clock() - begin > WARM_UP_S:
            return
        run()


def check_depths(manifest: Manifest) -> None:
    """Raise CalibrationError unless two segments differ in depth."""
    depths = {segment.layers[1] - segment.layers[0] for segment in manifest.segments if segment.layers}
    if len(depths) < 2:
        advice = ",".join(str(cut) for cut in measuring_checkpoints(manifest.model.num_layers))
        raise CalibrationError(
            f"all segments of the bundle have {min(depths)} layers, so the times of a launch and a layer cannot be separated; "
            f"measure on a bundle with segments of different depth, for example tide-export --checkpoints {advice}"
        )


def unsplit_ms(steps: Iterable[StepCost], num_layers: int) -> float:
    """Time of one decode step of the uncut model for one sequence. The head's time includes the only launch that is needed."""
    one = next((step for step in steps if (step.rows, step.seq) == (1, 1)), None)
    if one is None:
        raise CalibrationError("one sequence with one token was not measured; include 1 in seqs of batch size 1")
    return num_layers * one.layer_ms + max(one.head_ms, one.launch_ms) + one.host_ms


def _machine(backend: Backend) -> str:
    device = getattr(backend, "device", None)
    if device is not None and device.kind != "cpu":
        return str(device.name)
    cpu = platform.processor() or platform.machine()
    return f"{platform.system()} {cpu}, {len(os.sched_getaffinity(0))} cores"


def save_costs(table: CostTable, path: Path) -> None:
    """Write ``table`` to ``path``."""
    path.write_text(json.dumps(dataclasses.asdict(table), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def load_costs(path: Path) -> CostTable:
    """Read a table that `save_costs` wrote. Raises CalibrationError with the path and the fault when it is not a cost table."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read ({error.strerror}); give a cost table written on the target") from error
    except ValueError as error:
        raise CalibrationError(f"{path} is not JSON ({error}); measure the costs again") from error
    try:
        steps = [StepCost(**step) for step in data.pop("steps")]
        table = CostTable(steps=steps, **data)
        bad = [name for step in steps for name, value in vars(step).items() if not _is_valid(name, value)]
        bad += [] if _is_valid("unsplit_ms", table.unsplit_ms) else ["unsplit_ms"]
        bad += [] if steps else ["steps"]
    except (TypeError, KeyError, AttributeError) as error:
        raise CalibrationError(f"{path} is not a cost table ({error}); measure the costs again") from error
    if bad:
        raise CalibrationError(
            f"{path} has values of {', '.join(sorted(set(bad)))} that cannot be (times are in ms); measure them again"
        )
    return table


def _is_valid(name: str, value: Any) -> bool:
    if name == "rows":
        return isinstance(value, int) and value >= 1
    if name == "seq":
        return isinstance(value, int | float) and math.isfinite(value) and value >= 1
    minimum = 0.0 if name not in ("layer_ms", "unsplit_ms") else 1e-9
    return isinstance(value, int | float) and math.isfinite(value) and value >= minimum


if __name__ == "__main__":
    save_costs(measure_costs(sys.argv[1], sys.argv[2], threads=ThreadOptions(shared=True)), Path(sys.argv[3]))
