"""How much faster shallow segments run when they run again and again: their weights stay in the processor's caches.

A pass through all layers pushes them out, and every turn that stops early brings more of them back. A prefix that is too large
for the caches gains nothing, nor does one of a model of billions of parameters.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tide_runtime.backends.base import Backend, Step
from tide_runtime.bundle.manifest import HEAD, Manifest

TURNS = 8  # early stops in a row
# Until the processor's caches keep of a step what they keep when it runs again and again: passes, unless these take too long.
LEAST_WARM_UPS, MOST_WARM_UPS, WARM_UP_S = 2, 8, 0.03
LEAST_ROUNDS, QUANTILE = 5, 0.25
PLACE = 96  # cache slots filled before, where the cache has that many

Clock = Callable[[], float]  # seconds


def warm_up(run: Callable[[], object], clock: Clock) -> None:
    """Run until it takes as long as it will in use."""
    begin = clock()
    for passes in range(MOST_WARM_UPS):
        if passes >= LEAST_WARM_UPS and clock() - begin > WARM_UP_S:
            return
        run()


def measure_warm_shares(
    backend: Backend, manifest: Manifest, rounds: int = 40, budget_s: float = 3.0, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Layers of a prefix → what its segments and the head take in the 1st, 2nd, … turn after a pass through all layers, over
    what they take among such passes; one token, at most 1 each and never rising."""
    segments = [segment.name for segment in manifest.segments]
    step = backend.context(1).step(0, [1], [1])
    place = min(PLACE, manifest.max_seq_len - 1)
    samples: dict[int, list[list[float]]] = {end: [] for end in range(1, len(segments))}
    begin = clock()
    for turn in range(rounds):
        if turn >= LEAST_ROUNDS and clock() - begin > budget_s:
            break
        for end in samples:
            samples[end].append(_round(step, place, segments, end, clock))
    depths = itertools.accumulate(s.layers[1] - s.layers[0] for s in manifest.segments[:-1] if s.layers)
    return {str(depth): _shares(np.array(samples[end])) for depth, end in zip(depths, samples, strict=True)}


def _round(step: Step, place: int, segments: Sequence[str], end: int, clock: Clock) -> list[float]:
    """Seconds of the first ``end`` segments and the head: within passes through all of them, then ``TURNS`` times alone."""

    def timed(graphs: Sequence[str]) -> list[float]:
        step.place([place])
        times = [clock()]
        for graph in graphs:
            step.run(graph)
            times.append(clock())
        return np.diff(times).tolist()

    whole = [*segments, HEAD]
    warm_up(lambda: timed(whole), clock)
    cold = timed(whole)
    return [sum(cold[:end]) + cold[-1], *(sum(timed([*segments[:end], HEAD])) for _ in range(TURNS))]


def _shares(seconds: NDArray[np.float64]) -> list[float]:
    """Of [rounds, 1 + TURNS]; noise only ever adds, so a turn costs no more than the one before."""
    cold, *turns = np.quantile(seconds, QUANTILE, axis=0)
    return [round(float(share), 3) for share in np.minimum.accumulate(np.minimum(np.array(turns) / cold, 1.0))]
