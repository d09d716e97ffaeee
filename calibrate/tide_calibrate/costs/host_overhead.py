"""Measure the host overhead of a decode step: its wall time minus the time inside graphs.

Five kinds of steps are measured: a full step; a step that evaluates an exit and stops there; a verification pass, which runs the
remaining layers for all deferred tokens; a step of ``exact`` that looks up drafts in the text; a full step with sampling. Policy
``exit`` produces the second and third kind when its number of consecutive early stops is limited.
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
from tide_runtime.bundle.manifest import HEAD, Manifest
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
_PREFILL_CHUNK = 256  # prompt tokens per prefill step


@dataclass(frozen=True)
class HostTimes:
    """Median ms of a decode step outside graphs.

    Args:
        full: a step through all layers.
        exit_evaluation: a step that evaluates an exit and stops there.
        verification: a pass of all deferred tokens through the remaining layers.
        lookup: a pass through all layers behind a lookup of drafts in the text, with the drafts that are verified.
        draw: additional ms of a full step per sequence that samples its token.
    """

    full: float
    exit_evaluation: float
    verification: float
    lookup: float = 0.0
    draw: float = 0.0


def measure_host_times(engine: Engine, batch_sizes: Iterable[int]) -> dict[int, HostTimes]:
    """Measure the host times at each batch size with an exit at the first cut, over the graphs that ``engine`` has loaded."""
    stopwatch = _Stopwatch()
    full_policy = FullDepth()
    options = DepthOptions(threshold=0.0, max_exit_streak=STREAK)
    exit_policy = make_policy("exit", _with_exit(engine.manifest), options)
    lookup_policy = make_policy("exact", engine.manifest, DepthOptions(draft="ngram"))
    times = {}
    for batch_size in batch_sizes:
        exit_steps = _time_steps(engine, exit_policy, batch_size, stopwatch)
        samples = (
            _time_steps(engine, full_policy, batch_size, stopwatch),
            [step for step in exit_steps if step.evaluated_exit],
            [step for step in exit_steps if not step.evaluated_exit],
            _time_steps(engine, lookup_policy, batch_size, stopwatch),
            _time_steps(engine, full_policy, batch_size, stopwatch, temperature=1.0),
        )
        greedy, evaluation, verification, lookup, sampled = (
            float(np.median([step.outside_ms for step in kind])) for kind in samples
        )
        times[batch_size] = HostTimes(greedy, evaluation, verification, lookup, max(0.0, sampled - greedy) / batch_size)
    return times


def _with_exit(manifest: Manifest) -> Manifest:
    early_exit = ExitInfo(manifest.checkpoints[0], "identity", "max_probability", 0.0)
    return replace(manifest, calibration=CalibrationInfo([early_exit], draft_limit=1, recommended="exit"))


def _time_steps(
    engine: Engine, policy: DepthPolicy, batch_size: int, stopwatch: _Stopwatch, temperature: float = 0.0
) -> list[_TimedStep]:
    """Generate with ``batch_size`` sequences and return all decode steps but the last of each generation."""
    count = min(STEPS, engine.manifest.max_seq_len - PROMPT_TOKENS)
    params = GenerationParams(max_new_tokens=count, temperature=temperature, ignore_eos=True)
    context = observed(engine.backend, stopwatch).context(batch_size)
    steps = []
    for _ in range(REPEATS):
        stopwatch.clear()
        sequences = engine.admission.sequences([[0] * PROMPT_TOKENS] * batch_size, params)
        for _ in run(_TimedPolicy(policy, stopwatch), context, sequences):
            pass
        steps += stopwatch.steps()
    context.close()
    return steps


@dataclass(frozen=True)
class _TimedStep:
    evaluated_exit: bool
    outside_ms: float


class _Stopwatch:
    """Records when each step began, how long its graphs ran, and whether it evaluated an exit."""

    def __init__(self) -> None:
        self.began, self.inside, self.evaluated_exit = list[float](), list[float](), list[bool]()

    def clear(self) -> None:
        for samples in (self.began, self.inside, self.evaluated_exit):
            samples.clear()

    def begin(self) -> None:
        self.began.append(perf_counter())
        self.inside.append(0.0)
        self.evaluated_exit.append(False)

    def launched(self, graph: str, rows: int, tokens: int, longest: int, seconds: float) -> None:
        if self.began:  # launches of the prefill come before the first decode step
            self.inside[-1] += seconds
            self.evaluated_exit[-1] |= graph == HEAD

    def steps(self) -> list[_TimedStep]:
        wall = np.diff(self.began)
        return [_TimedStep(*pair) for pair in zip(self.evaluated_exit[:-1], (wall - self.inside[:-1]) * 1e3, strict=True)]


class _TimedPolicy:
    """A depth policy that reports the start of each decode step to a stopwatch."""

    def __init__(self, policy: DepthPolicy, stopwatch: _Stopwatch) -> None:
        self.name, self.lookahead, self.reusable_tokens = policy.name, policy.lookahead, policy.reusable_tokens
        self._policy, self._stopwatch = policy, stopwatch

    def step(
        self, context: ExecutionContext, decoding: Sequence[TokenSequence], prompts: Sequence[PromptChunk]
    ) -> list[list[int]]:
        if decoding:
            self._stopwatch.begin()
        return self._policy.step(context, decoding, prompts)
