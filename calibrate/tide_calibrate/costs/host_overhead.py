"""Measure the host overhead of a decode step: its wall time minus the time inside graphs.

Two figures: one of a full step, and one of all steps that use depth: those that evaluate an exit and stop there, verification
passes, which run the remaining layers for all deferred tokens, and steps of ``exact`` that look up drafts in the text. Policy
``exit`` produces the first two of these when its number of consecutive early stops is limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
from tide_runtime import Engine, GenerationParams
from tide_runtime.backends.base import ExecutionContext
from tide_runtime.backends.observed import observed
from tide_runtime.bundle.calibration import CalibrationInfo, ExitInfo
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.full import FullDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import DepthPolicy, PromptChunk
from tide_runtime.depth.registry import make_policy
from tide_runtime.scheduling.step import run
from tide_runtime.sequence import TokenSequence

PROMPT_TOKENS = 8
STEPS = 64
REPEATS = 2
STREAK = 3  # early stops between verification passes: the first one after a pass finds the interpreter's own data evicted


@dataclass(frozen=True)
class HostTimes:
    """Median ms of a decode step outside graphs.

    Args:
        full: a step through all layers.
        depth: a step that evaluates an exit, runs the remaining layers of deferred tokens, or looks up drafts in the text.
    """

    full: float
    depth: float


def measure_host_times(engine: Engine, batch_sizes: Iterable[int]) -> dict[int, HostTimes]:
    """Measure the host times at each batch size with an exit at the first cut, over the graphs that ``engine`` has loaded."""
    stopwatch = _Stopwatch()
    full_policy = FullDepth()
    options = DepthOptions(threshold=0.0, max_exit_streak=STREAK)
    exit_policy = make_policy("exit", _with_exit(engine.manifest), options)
    lookup_policy = make_policy("exact", engine.manifest, DepthOptions(draft="ngram"))
    times = {}
    for batch_size in batch_sizes:
        full, exits, lookups = (
            _outside_ms(engine, policy, batch_size, stopwatch) for policy in (full_policy, exit_policy, lookup_policy)
        )
        times[batch_size] = HostTimes(float(np.median(full)), float(np.median([*exits, *lookups])))
    return times


def _with_exit(manifest: Manifest) -> Manifest:
    early_exit = ExitInfo(manifest.checkpoints[0], "identity", "max_probability", 0.0)
    return replace(manifest, calibration=CalibrationInfo([early_exit], draft_limit=1, recommended="exit"))


def _outside_ms(engine: Engine, policy: DepthPolicy, batch_size: int, stopwatch: _Stopwatch) -> list[float]:
    """ms outside graphs of all decode steps but the last of each generation, with ``batch_size`` sequences."""
    count = min(STEPS, engine.manifest.max_seq_len - PROMPT_TOKENS)
    params = GenerationParams(max_new_tokens=count, ignore_eos=True)
    context = observed(engine.backend, stopwatch).context(batch_size)
    steps = list[float]()
    for _ in range(REPEATS):
        stopwatch.clear()
        sequences = engine.admission.sequences([[0] * PROMPT_TOKENS] * batch_size, params)
        for _ in run(_TimedPolicy(policy, stopwatch), context, sequences):
            pass
        steps += stopwatch.outside_ms()
    context.close()
    return steps


class _Stopwatch:
    """Records when each step began and how long its graphs ran."""

    def __init__(self) -> None:
        self.began, self.inside = list[float](), list[float]()

    def clear(self) -> None:
        self.began.clear()
        self.inside.clear()

    def begin(self) -> None:
        self.began.append(perf_counter())
        self.inside.append(0.0)

    def launched(self, graph: str, rows: int, tokens: int, longest: int, seconds: float) -> None:
        if self.began:  # launches of the prefill come before the first decode step
            self.inside[-1] += seconds

    def outside_ms(self) -> list[float]:
        return ((np.diff(self.began) - self.inside[:-1]) * 1e3).tolist()


class _TimedPolicy:
    """A depth policy that reports the start of each decode step to a stopwatch."""

    def __init__(self, policy: DepthPolicy, stopwatch: _Stopwatch) -> None:
        self.name = policy.name
        self.lookahead = policy.lookahead
        self.reusable_tokens = policy.reusable_tokens
        self._policy, self._stopwatch = policy, stopwatch

    def step(
        self, context: ExecutionContext, decoding: Sequence[TokenSequence], prompts: Sequence[PromptChunk]
    ) -> list[list[int]]:
        if decoding:
            self._stopwatch.begin()
        return self._policy.step(context, decoding, prompts)
