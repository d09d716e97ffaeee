"""Arms in this process: an engine that lends itself to one depth policy at a time, so that all run on the same weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from time import perf_counter
from typing import Any, cast

from tide_bench.arms.tide import mean_depth
from tide_runtime import Engine, GenerationParams
from tide_runtime.backends.observed import ObservedBackend
from tide_runtime.policies.base import DepthPolicy

from benchmarks.launch_log import LaunchLog, LoggedPolicy
from benchmarks.turns import Group, Turn


class LoggedEngine:
    """``engine`` with its launches counted by shape. ``layers``: graph name → decoder layers it runs."""

    def __init__(self, engine: Engine) -> None:
        self.log = LaunchLog()
        self.manifest = engine.manifest
        self.layers: dict[str, int] = cast(Any, engine.backend).layers
        engine.backend = ObservedBackend(engine.backend, self.log)
        self._engine = engine

    def turn(self, policy: DepthPolicy, prompts: Group, params: GenerationParams, rows: int) -> Turn:
        """Generate with ``policy``, ``rows`` at once. Raises RuntimeError when the log and the backend counted differently."""
        engine, log = self._engine, self.log
        engine.policy, engine.options = LoggedPolicy(policy, log), replace(engine.options, max_batch=rows)
        before = Counter(engine.backend.launches)
        log.clear()
        begin = perf_counter()
        done = engine.generate(prompts, params)
        seconds = perf_counter() - begin - log.prefill_seconds
        self._check(Counter(engine.backend.launches) - before)
        return Turn(
            tokens=[list(row.token_ids) for row in done],
            seconds=seconds,
            launches=Counter(log.decode),
            layers_per_token=sum(row.stats.layers_per_token for row in done) / len(done),
            depth=mean_depth(done, self.manifest.model.num_layers),
            drafted=sum((Counter(row.stats.drafted) for row in done), Counter()),
            accepted=sum((Counter(row.stats.accepted) for row in done), Counter()),
        )

    def _check(self, counted: Counter[str]) -> None:
        logged: Counter[str] = Counter()
        for launch, count in (self.log.prefill + self.log.decode).items():
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
