"""How long the runtime's own loop takes: the wall time of a decode turn less the time spent inside graphs.

Four kinds of turns differ: a plain one; one that asks an exit and stops there; one that takes all that waits through the
remaining layers; a plain one that draws its tokens at random. The second and third kind are seen in policy ``exit`` when it may
only stop so often in a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np
from tide_runtime import Engine, GenerationParams
from tide_runtime.backends.base import ExecutionContext
from tide_runtime.backends.observed import ObservedBackend
from tide_runtime.bundle.calibration import CalibrationInfo, ExitInfo
from tide_runtime.bundle.manifest import HEAD, Manifest
from tide_runtime.depth.full import FullDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import DepthPolicy
from tide_runtime.depth.registry import make_policy
from tide_runtime.sequence import TokenSequence

PROMPT_TOKENS = 8
TURNS = 64
REPEATS = 2
STREAK = 3  # early stops between deep passes: after one, the processor has to fetch Python's own data again
_CHUNK = 256  # prompt tokens per prefill step


@dataclass(frozen=True)
class HostTimes:
    """Median ms of a turn outside graphs: a plain one, one that asks an exit and stops, one that runs what waits; ``draw``: what
    it takes longer for each row that chooses its token at random."""

    plain: float
    ask: float
    deep: float
    draw: float = 0.0


def measure_host_times(engine: Engine, rows: Iterable[int]) -> dict[int, HostTimes]:
    """The host's share of turns of so many ``rows`` in ``engine``'s real generation loop, its first cut an exit.

    The engine is not to be used again: its pool keeps slots that report here.
    """
    stopwatch = _Stopwatch()
    engine.backend = ObservedBackend(engine.backend, stopwatch)
    plain = FullDepth(engine.manifest, _CHUNK)
    options = DepthOptions(threshold=0.0, max_exit_streak=STREAK)
    lazy = make_policy("exit", _with_exit(engine.manifest), _CHUNK, options)
    times = {}
    for count in rows:
        turns = _turns(engine, lazy, count, stopwatch)
        samples = (
            _turns(engine, plain, count, stopwatch),
            [turn for turn in turns if turn.asked],
            [turn for turn in turns if not turn.asked],
            _turns(engine, plain, count, stopwatch, temperature=1.0),
        )
        greedy, ask, deep, random = (float(np.median([turn.outside_ms for turn in kind])) for kind in samples)
        times[count] = HostTimes(greedy, ask, deep, max(0.0, random - greedy) / count)
    return times


def _with_exit(manifest: Manifest) -> Manifest:
    exit = ExitInfo(manifest.checkpoints[0], "identity", "max_probability", 0.0)
    return replace(manifest, calibration=CalibrationInfo([exit], draft_limit=1, recommended="exit"))


def _turns(engine: Engine, policy: DepthPolicy, rows: int, stopwatch: _Stopwatch, temperature: float = 0.0) -> list[_Turn]:
    """Of generations of ``rows`` rows, all turns that another one follows."""
    count = min(TURNS, engine.manifest.max_seq_len - PROMPT_TOKENS)
    engine.policy = _WatchedPolicy(policy, stopwatch)
    params = GenerationParams(max_new_tokens=count, temperature=temperature, ignore_eos=True)
    turns = []
    for _ in range(REPEATS):
        stopwatch.clear()
        engine.generate([[0] * PROMPT_TOKENS] * rows, params)
        turns += stopwatch.turns()
    return turns


@dataclass(frozen=True)
class _Turn:
    asked: bool
    outside_ms: float


class _Stopwatch:
    """When each turn began, how long its graphs ran, and whether an exit was asked."""

    def __init__(self) -> None:
        self.began, self.inside, self.asked = list[float](), list[float](), list[bool]()

    def clear(self) -> None:
        for samples in (self.began, self.inside, self.asked):
            samples.clear()

    def begin(self) -> None:
        self.began.append(perf_counter())
        self.inside.append(0.0)
        self.asked.append(False)

    def launched(self, graph: str, rows: int, tokens: int, longest: int, seconds: float) -> None:
        if self.began:  # prompts come before the first turn
            self.inside[-1] += seconds
            self.asked[-1] |= graph == HEAD

    def turns(self) -> list[_Turn]:
        wall = np.diff(self.began)
        return [_Turn(*pair) for pair in zip(self.asked[:-1], (wall - self.inside[:-1]) * 1e3, strict=True)]


class _WatchedPolicy:
    """A depth policy whose turns a stopwatch sees."""

    def __init__(self, policy: DepthPolicy, stopwatch: _Stopwatch) -> None:
        self.name = policy.name
        self._policy, self._stopwatch = policy, stopwatch

    def prefill(self, context: ExecutionContext, row: TokenSequence) -> int:
        return self._policy.prefill(context, row)

    def decode(self, context: ExecutionContext, rows: Sequence[TokenSequence]) -> list[list[int]]:
        self._stopwatch.begin()
        return self._policy.decode(context, rows)
