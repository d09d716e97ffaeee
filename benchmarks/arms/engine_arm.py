"""Arms in this process: an engine that runs one depth policy at a time, so that all run on the same weights."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import islice
from time import perf_counter
from typing import cast

from tide_bench.arms.tide import mean_depth
from tide_runtime import Engine, GenerationParams
from tide_runtime.backends.base import ExecutionContext
from tide_runtime.backends.observed import ObservedBackend
from tide_runtime.backends.onnxruntime.cpu import OnnxRuntimeBackend
from tide_runtime.depth.policy import DepthPolicy
from tide_runtime.outputs import finished
from tide_runtime.scheduling.step import run

from benchmarks.arms.launch_log import LaunchLog, LoggedPolicy
from benchmarks.arms.turns import Group, Turn


class LoggedEngine:
    """``engine`` with its launches counted by shape. ``layers``: graph name → decoder layers it runs."""

    def __init__(self, engine: Engine) -> None:
        self.log = LaunchLog()
        self.manifest = engine.manifest
        self.sessions = cast(OnnxRuntimeBackend, engine.backend)
        self.layers = self.sessions.layers
        self.backend = ObservedBackend(self.sessions, self.log)
        self.engine = engine
        self._contexts: dict[int, ExecutionContext] = {}

    def context(self, rows: int) -> ExecutionContext:
        """Caches for ``rows`` sequences, the same for every turn: new ones would bind every graph again."""
        if rows not in self._contexts:
            self._contexts[rows] = self.backend.context(rows)
        return self._contexts[rows]

    def second(self) -> LoggedEngine:
        """An engine with caches and counts of its own that runs the very same sessions: where in memory a graph happens to lie
        makes it a percent or two faster or slower for as long as it is loaded."""
        shared = self.sessions
        backend = OnnxRuntimeBackend(shared.manifest, shared.layers, shared.session, shared.forms, shared.pads_attention)
        return LoggedEngine(Engine(self.engine.bundle, self.engine.options, backend=backend))

    def turn(self, policy: DepthPolicy, prompts: Group, params: GenerationParams, rows: int) -> Turn:
        """Generate with ``policy``, ``rows`` at once."""
        play = self.start(policy, prompts, params, rows)
        while play.advance(sys.maxsize):
            pass
        return play.turn()

    def start(self, policy: DepthPolicy, prompts: Group, params: GenerationParams, rows: int) -> EnginePlay:
        """A turn, to be advanced; the engine runs one at a time."""
        self.log.clear()
        return EnginePlay(self, LoggedPolicy(policy, self.log), prompts, params, rows)


class EnginePlay:
    """A turn on an engine, which pauses between tokens."""

    def __init__(self, logged: LoggedEngine, policy: DepthPolicy, prompts: Group, params: GenerationParams, rows: int) -> None:
        self._logged, self._policy = logged, policy
        self._rows = logged.engine.admission.sequences(prompts, params)
        self._events = run(policy, logged.context(rows), self._rows)
        self._launched = Counter(logged.backend.launches)
        self._seconds, self._generated = 0.0, 0

    def advance(self, tokens: int) -> bool:
        """Generate until the sequences have ``tokens``, their first ones included; False when they are finished."""
        begin = perf_counter()
        self._generated += sum(1 for _ in islice(self._events, max(0, tokens - self._generated)))
        self._seconds += perf_counter() - begin
        return self._generated >= tokens

    def turn(self) -> Turn:
        """The result. Raises RuntimeError when the log and the backend counted differently."""
        log = self._logged.log
        done = [finished(row, self._policy.name, self._logged.engine.tokenizer) for row in self._rows]
        _check(log, Counter(self._logged.backend.launches) - self._launched)
        return Turn(
            tokens=[list(row.token_ids) for row in done],
            seconds=self._seconds - log.prefill_seconds,
            launches=log.decode,
            layers_per_token=sum(row.stats.layers_per_token for row in done) / len(done),
            depth=mean_depth(done, self._logged.manifest.model.num_layers),
            drafted=sum((Counter(row.stats.drafted) for row in done), Counter()),
            accepted=sum((Counter(row.stats.accepted) for row in done), Counter()),
        )


def _check(log: LaunchLog, counted: Counter[str]) -> None:
    logged: Counter[str] = Counter()
    for launch, count in (log.prefill + log.decode).items():
        logged[launch.graph] += count
    if logged != counted:
        raise RuntimeError(f"the backend launched {dict(counted)}, the log has {dict(logged)}")


class EngineArm:
    """One depth policy on an engine."""

    most_groups: int | None = None

    def __init__(self, engine: LoggedEngine, policy: DepthPolicy) -> None:
        self.engine, self.policy = engine, policy

    def turn(self, prompts: Group, params: GenerationParams, rows: int) -> Turn:
        return self.engine.turn(self.policy, prompts, params, rows)

    def start(self, prompts: Group, params: GenerationParams, rows: int) -> EnginePlay:
        return self.engine.start(self.policy, prompts, params, rows)
