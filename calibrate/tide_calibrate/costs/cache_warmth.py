"""Measure how much faster shallow segments run while their weights are in the processor's caches.

A pass through all layers evicts them, and every consecutive step that stops early brings more of them back. A prefix that is
larger than the caches, as in a model of billions of parameters, gains nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from tide_runtime.backends.base import Backend, Step
from tide_runtime.bundle.manifest import HEAD, Manifest

CONSECUTIVE_STOPS = 8  # consecutive early stops
# Passes until the processor's caches are in the state of continuous decoding; a slow model needs fewer than the maximum.
MIN_WARM_UPS, MAX_WARM_UPS, WARM_UP_S = 2, 8, 0.03
MIN_ROUNDS, QUANTILE = 5, 0.25
NUM_CACHED_TOKENS = 96  # KV cache slots filled before the timed step, if the cache has that many

Clock = Callable[[], float]  # seconds


def warm_up(run: Callable[[], object], clock: Clock) -> None:
    """Call ``run`` until the caches are as warm as in continuous decoding."""
    begin = clock()
    for passes in range(MAX_WARM_UPS):
        if passes >= MIN_WARM_UPS and clock() - begin > WARM_UP_S:
            return
        run()


def measure_warm_shares(
    backend: Backend, manifest: Manifest, rounds: int = 40, budget_s: float = 3.0, clock: Clock = time.perf_counter
) -> dict[str, list[float]]:
    """Time each prefix of segments and the head in repeated early stops, relative to their time within full passes.

    Returns:
        Layers of the prefix → shares in the 1st, 2nd, … consecutive early stop after a pass through all layers, for one token;
        at most 1 each and non-increasing.
    """
    segments = [segment.name for segment in manifest.segments]
    step = backend.context(1).step(0, [1], [1])
    num_cached_tokens = min(NUM_CACHED_TOKENS, manifest.max_seq_len - 1)
    samples: dict[int, list[list[float]]] = {end: [] for end in range(1, len(segments))}
    begin = clock()
    for finished in range(rounds):
        if finished >= MIN_ROUNDS and clock() - begin > budget_s:
            break
        for end in samples:
            samples[end].append(_time_round(step, num_cached_tokens, segments, end, clock))
    depths = itertools.accumulate(s.layers[1] - s.layers[0] for s in manifest.segments[:-1] if s.layers)
    return {str(depth): _shares(np.array(samples[end])) for depth, end in zip(depths, samples, strict=True)}


def _time_round(step: Step, num_cached_tokens: int, segments: Sequence[str], end: int, clock: Clock) -> list[float]:
    """Seconds of the first ``end`` segments and the head: within a full pass, then ``CONSECUTIVE_STOPS`` times alone."""

    def timed(graphs: Sequence[str]) -> list[float]:
        step.place([num_cached_tokens])
        times = [clock()]
        for graph in graphs:
            step.run(graph)
            times.append(clock())
        return np.diff(times).tolist()

    whole = [*segments, HEAD]
    warm_up(lambda: timed(whole), clock)
    cold = timed(whole)
    return [sum(cold[:end]) + cold[-1], *(sum(timed([*segments[:end], HEAD])) for _ in range(CONSECUTIVE_STOPS))]


def _shares(seconds: NDArray[np.float64]) -> list[float]:
    """Shares of seconds [rounds, 1 + CONSECUTIVE_STOPS], made non-increasing, because noise only adds time."""
    cold, *turns = np.quantile(seconds, QUANTILE, axis=0)
    return [round(float(share), 3) for share in np.minimum.accumulate(np.minimum(np.array(turns) / cold, 1.0))]
