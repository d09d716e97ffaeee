"""TIDE's own arm: any depth policy on a bundle; also runs the unsplit graph, a bundle that is cut nowhere."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from tide_runtime import Engine, EngineOptions, GenerationParams
from tide_runtime.backends.base import ExecutionContext
from tide_runtime.backends.onnxruntime.threads import ThreadOptions
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import DepthPolicy, LoadedPolicy
from tide_runtime.depth.registry import make_policy
from tide_runtime.outputs import Generation, finished
from tide_runtime.scheduling.step import run

from tide_bench.arms.base import Timing
from tide_bench.teacher_forcing import Reading, logits_gap, read_text


class TideArm:
    """One shared thread pool, as `tide-run` has it; every policy on the same weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._engine = load_second(folder)
        self._runner = PolicyRunner(self._engine)
        self._policies: dict[tuple[str, float | None], LoadedPolicy] = {}

    def generate(self, prompts: list[list[int]], new_tokens: int, policy: str = "full", threshold: float | None = None) -> Timing:
        """``threshold`` replaces the certified ones of ``exit``. Raises ParamsError when the bundle cannot run the policy."""
        return self._runner(self._policy(policy, threshold), prompts, new_tokens)

    def read(self, text: Sequence[int], prompt_tokens: int, policy: str, threshold: float | None = None) -> Reading:
        """The policy's token at every place of ``text`` after the first ``prompt_tokens`` (see `Reading`)."""
        with self._alone(policy, threshold) as engine:
            return read_text(engine, text, prompt_tokens)

    def gap(self, text: Sequence[int], one: int, other: int) -> float:
        """Distance of two tokens' logits behind ``text``, every layer run."""
        with self._alone("full", None) as engine:
            return logits_gap(engine, text, one, other)

    def _alone(self, policy: str, threshold: float | None) -> Engine:
        """An engine of the same weights for one sequence at a time."""
        options = replace(self._engine.options, max_batch=1, prefix_cache=False)
        return Engine(self._engine.bundle, options, backend=self._engine.backend, policy=self._policy(policy, threshold))

    def _policy(self, policy: str, threshold: float | None) -> LoadedPolicy:
        if (policy, threshold) not in self._policies:
            self._policies[policy, threshold] = make_policy(policy, self._manifest(), DepthOptions(threshold=threshold))
        return self._policies[policy, threshold]

    def _manifest(self) -> Manifest:
        return self._engine.manifest

    def loop_overhead(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Share of a generation's wall time spent outside ONNX Runtime: our Python."""
        engine, spent = load_engine(self.folder), Stopwatch()
        backend = cast(Any, engine.backend)
        load, sessions = backend._load, backend.sessions
        backend._load = lambda name: _TimedSession(load(name), spent)  # of what is loaded when first needed
        sessions.update({name: _TimedSession(session, spent) for name, session in sessions.items()})
        runner, policy = PolicyRunner(engine), make_policy("full", engine.manifest, DepthOptions())
        runner(policy, prompts, new_tokens)  # binds buffers, which later calls reuse
        spent.seconds, start = 0.0, perf_counter()
        runner(policy, prompts, new_tokens)
        return 1 - spent.seconds / (perf_counter() - start)


class Stopwatch:
    """Seconds gathered over many calls."""

    def __init__(self) -> None:
        self.seconds = 0.0


class _TimedSession:
    """An inference session that notes the time spent in ``run_with_iobinding``."""

    def __init__(self, session: Any, spent: Stopwatch) -> None:
        self._session, self._spent = session, spent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, *args: Any) -> None:
        start = perf_counter()
        self._session.run_with_iobinding(*args)
        self._spent.seconds += perf_counter() - start


def load_engine(folder: Path) -> Engine:
    """On the CPU, where all arms are: a GPU that TIDE found would be compared with the others' processor."""
    return Engine.load(folder, EngineOptions(threads=ThreadOptions(shared=True), verify=False), device="cpu")


def load_second(folder: Path) -> Engine:
    """An engine loaded after another one that is gone again.

    What a process loads first was found to run some percent faster than the same loaded later: a whole graph has all of
    that, of a bundle in segments the first one only. So no engine that is compared is its process' first.
    """
    load_engine(folder).close()
    gc.collect()
    return load_engine(folder)


class PolicyRunner:
    """Generates greedily with one policy or another over the weights of ``engine``: the prompts together, then their decodes, so
    that both can be timed. The same caches and bindings serve all calls of a batch size."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._contexts = engine, dict[int, ExecutionContext]()

    def __call__(self, policy: DepthPolicy, prompts: list[list[int]], new_tokens: int) -> Timing:
        engine, rows = self._engine, len(prompts)
        context = self._contexts.get(rows) or self._contexts.setdefault(rows, engine.backend.context(rows))
        start = perf_counter()
        sequences = engine.admission.sequences(prompts, GenerationParams(max_new_tokens=new_tokens, ignore_eos=True))
        for _ in run(policy, context, sequences):
            pass
        wall = perf_counter() - start
        done = [finished(sequence, policy.name, None) for sequence in sequences]
        first = max(one.stats.time_to_first_token for one in done)
        layers = sum(one.stats.layers_per_token for one in done) / rows
        return Timing([list(one.token_ids) for one in done], first, wall - first, layers, mean_depth(done, engine.depth))


def mean_depth(rows: Sequence[Generation], num_layers: int) -> float:
    """Mean layers run for a token, over the tokens after the first; where there are none, ``num_layers``."""
    depths = [depth for row in rows for depth in row.stats.token_depths or [num_layers] * (row.stats.new_tokens - 1)]
    return sum(depths) / len(depths) if depths else float(num_layers)
