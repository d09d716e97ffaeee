"""Stage 7: decode loops of real bundles: driven by the device they generate the host's tokens, and the host rarely waits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch  # noqa: F401  # loads CUDA's libraries before ONNX Runtime looks for them
from tide_runtime import Engine, EngineOptions

from benchmarks.gpu.decode_arms import release_memory
from benchmarks.gpu.decode_loop import compare, complaint
from benchmarks.gpu.kit.case import Bench, Figures, KitCase, NotRun
from benchmarks.gpu.kit.stages.decode import require_cuda_provider
from benchmarks.gpu.kit.without_gpu import assembled_loop
from benchmarks.gpu.loop_cases import LoopCase, demo_prompts, engine_target, loop_cases, write_demo

_ROWS = (1, 4)  # sequences at once
_SECONDS = {"cuda": 25.0}  # a bundle of TensorRT's engines takes longer to build
_ENGINE_SECONDS = 60.0


def cases(bench: Bench) -> Iterator[KitCase]:
    """The loops, and a case that is not run where policy `exit` has no target because TensorRT is missing."""
    engine = None if bench.dry else engine_target()
    for case in loop_cases(engine):
        for rows in _ROWS:
            trial = _Trial(case, rows, bench)
            seconds = _SECONDS.get(case.target, _ENGINE_SECONDS)
            yield KitCase(f"{case.name}_b{rows}", seconds, trial.run, trial.prepare, limit=150)
    if engine is None:
        yield KitCase("policy_exit", 0, _no_engines, lambda: {})


def _no_engines() -> Figures:
    raise NotRun("policy exit on the device needs TensorRT's engines for this GPU; neither TensorRT nor TensorRT-RTX is here")


class _Trial:
    def __init__(self, case: LoopCase, rows: int, bench: Bench) -> None:
        self._case, self._rows, self._bench = case, rows, bench

    def run(self) -> Figures:
        if self._case.target == "cuda":
            require_cuda_provider(self._bench)
        options = EngineOptions(target=self._case.target, policy=self._case.policy, max_batch=max(_ROWS), verify=False)
        with Engine.load(bundle_of(self._case, self._bench.work), options) as engine:
            row = compare(engine, demo_prompts(self._rows))
        release_memory()
        wrong = complaint(self._case, row)
        assert wrong is None, f"{wrong}: {row}"
        return {"target": self._case.target, **row}

    def prepare(self) -> Figures:
        folder = bundle_of(self._case, self._bench.work)
        return {"nodes": assembled_loop(folder, self._case, self._rows, self._bench.compute)}


@cache
def bundle_of(case: LoopCase, work: Path) -> Path:
    folder = work / "loops" / case.name
    if not (folder / "manifest.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_demo(case, folder)
    return folder
