"""TIDE's own arm: any depth policy on a bundle; also runs the unsplit graph, a bundle that is cut nowhere."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any, cast

from tide_runtime import Engine, EngineOptions, GenerationParams
from tide_runtime.backends.onnxruntime.threads import ThreadOptions
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.policy import DepthPolicy
from tide_runtime.depth.registry import make_policy
from tide_runtime.outputs import Generation

from tide_bench.arms.base import Timing
from tide_bench.teacher_forcing import Reading, logits_gap, read_text


class TideArm:
    """One shared thread pool, as `tide-run` has it; every policy on the same weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._engine = load_second(folder)
        self._policies: dict[tuple[str, float | None], DepthPolicy] = {}

    def generate(self, prompts: list[list[int]], new_tokens: int, policy: str = "full", threshold: float | None = None) -> Timing:
        """``threshold`` replaces the certified ones of ``exit``. Raises ParamsError when the bundle cannot run the policy."""
        self._take(policy, threshold, len(prompts))
        return timed_generate(self._engine, prompts, new_tokens)

    def read(self, text: Sequence[int], prompt_tokens: int, policy: str, threshold: float | None = None) -> Reading:
        """The policy's token at every place of ``text`` after the first ``prompt_tokens`` (see `Reading`)."""
        self._take(policy, threshold, 1)
        return read_text(self._engine, text, prompt_tokens)

    def gap(self, text: Sequence[int], one: int, other: int) -> float:
        """Distance of two tokens' logits behind ``text``, every layer run."""
        self._take("full", None, 1)
        return logits_gap(self._engine, text, one, other)

    def _take(self, policy: str, threshold: float | None, rows: int) -> None:
        if (policy, threshold) not in self._policies:
            self._policies[policy, threshold] = self._make(policy, threshold)
        self._engine.policy = self._policies[policy, threshold]
        self._engine.options = replace(self._engine.options, max_batch=rows)

    def _make(self, policy: str, threshold: float | None) -> DepthPolicy:
        chunk = self._engine.options.prefill_chunk
        return make_policy(policy, self._manifest(), DepthOptions(threshold=threshold))

    def _manifest(self) -> Manifest:
        return self._engine.manifest

    def loop_overhead(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Share of a generation's wall time spent outside ONNX Runtime: our Python."""
        engine, spent = load_engine(self.folder), Stopwatch()
        backend = cast(Any, engine.backend)
        load, sessions = backend._load, backend.sessions
        backend._load = lambda name: _TimedSession(load(name), spent)  # of what is loaded when first needed
        sessions.update({name: _TimedSession(session, spent) for name, session in sessions.items()})
        timed_generate(engine, prompts, new_tokens)  # binds buffers, which later calls reuse
        spent.seconds, start = 0.0, perf_counter()
        timed_generate(engine, prompts, new_tokens)
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


def timed_generate(engine: Engine, prompts: list[list[int]], new_tokens: int) -> Timing:
    """Greedy, with the engine's policy. Rows are prefilled one after the other and then decode together."""
    start = perf_counter()
    rows = engine.generate(prompts, GenerationParams(max_new_tokens=new_tokens, ignore_eos=True))
    wall = perf_counter() - start
    first = max(row.stats.time_to_first_token for row in rows)
    layers = sum(row.stats.layers_per_token for row in rows) / len(rows)
    return Timing([list(row.token_ids) for row in rows], first, wall - first, layers, mean_depth(rows, engine.depth))


def mean_depth(rows: Sequence[Generation], num_layers: int) -> float:
    """Mean layers run for a token, over the tokens after the first."""
    depths = [depth for row in rows for depth in row.stats.token_depths or [num_layers] * (row.stats.new_tokens - 1)]
    return sum(depths) / len(depths)
