"""Stage 6: ONNX Runtime's CUDA provider: whether the demo model generates eager's tokens in fp32, and how fast bundles decode.

Every arm is a case of its own, as a library that dies takes its process along. Tokens are kept for comparisons with eager's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np
import torch  # loads CUDA's libraries, which ONNX Runtime's provider needs, before ONNX Runtime looks for them

from benchmarks.gpu.decode_arms import COMPILED, DecodeArm, TideArm, TorchArm, release_memory
from benchmarks.gpu.decode_cases import DecodeCase, decode_cases
from benchmarks.gpu.decode_cuda import TARGET, arm_figures, bundle, bundle_folder, prompts
from benchmarks.gpu.kit.case import Bench, Figures, KitCase, NotRun
from benchmarks.gpu.kit.without_gpu import run_cuda_target_on_host
from benchmarks.gpu.model_shapes import MAX_SEQ_LEN, ModelShape
from tide_export.load import LoadedModel

_NEW, _REPEATS = 64, 5
_DRY_PROMPT, _DRY_NEW = 8, 4
_BUNDLE_OF = {"unsplit": "unsplit", "tide": "tide", "exact": "tide"}  # arm → the arm that its bundle is named for
# Seconds of an arm, and of exporting a bundle, on small and on large models; of the first compilation by torch.
_ARM_S = {"demo": 7.0, "1b": 10.0}
_EXPORT_S = {"demo": 4.0, "1b": 22.0}
_COMPILE_S = {"demo": 25.0, "1b": 40.0}
_ORDER = ["demo_fp32", "demo_fp16", "1b_fp16", "1b_int4", "demo_int4"]


def cases(bench: Bench) -> Iterator[KitCase]:
    """Identity first, then speed; each model's bundles are exported, measured and deleted before the next one's."""
    found = sorted(decode_cases(), key=lambda case: _ORDER.index(f"{case.shape.name}_{case.dtype}"))
    for (shape, dtype), group in groupby(found, key=lambda case: (case.shape, case.dtype)):
        used = _DRY_SHAPES.get(shape.name, shape) if bench.dry else shape
        for arm in dict.fromkeys(_BUNDLE_OF.values()):
            export = _Export(used, dtype, arm, bench)
            yield KitCase(f"{shape.name}_{dtype}_export_{arm}", _EXPORT_S[shape.name], export.run, export.run, limit=240)
        for case in group:
            for arm in case.arms:
                trial = _Trial(replace(case, shape=used), arm, bench)
                seconds = _ARM_S[shape.name] + (_COMPILE_S[shape.name] if arm == "compile" else 0)
                yield KitCase(f"{case.name}_{arm}", seconds, trial.run, trial.prepare, limit=150)
        drop = _Drop(bundle_folder(used, dtype, bench.work))
        yield KitCase(f"{shape.name}_{dtype}_deleted", 1, drop.run, drop.run)


# In a dry run, a model of the same kind that takes seconds.
_DRY_SHAPES = {"1b": ModelShape("1b", ("fp16", "int4"), 4, 256, 8, 2, 512, 1024)}


class _Export:
    def __init__(self, shape: ModelShape, dtype: str, arm: str, bench: Bench) -> None:
        self._shape, self._dtype, self._arm, self._bench = shape, dtype, arm, bench

    def run(self) -> Figures:
        require_cuda_provider(self._bench)
        folder = bundle(self._shape, self._dtype, self._arm, self._bench.work, lambda dtype: model(self._shape, dtype))
        return {"bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())}


class _Drop:
    """Disk is scarce on rented machines: the shapes of all models at once would take 110 GB."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self) -> Figures:
        shutil.rmtree(self._folder, ignore_errors=True)
        model.cache_clear()
        return {"free_gib": shutil.disk_usage(self._folder.parent).free / 2**30}


class _Trial:
    """One arm of a case."""

    def __init__(self, case: DecodeCase, arm: str, bench: Bench) -> None:
        self._case, self._arm, self._bench = case, arm, bench

    def run(self) -> Figures:
        require_cuda_provider(self._bench)
        return self._figures("cuda", _NEW, _REPEATS)

    def prepare(self) -> Figures:
        run_cuda_target_on_host()
        return self._figures("cpu", _DRY_NEW, 1)

    def _figures(self, device: str, new_tokens: int, repeats: int) -> Figures:
        case, given = self._case, [prompt[: _DRY_PROMPT if self._bench.dry else None] for prompt in prompts(self._case)]
        try:
            figures = arm_figures(self._load(device), given, new_tokens, repeats)
        finally:
            release_memory()
        kept = self._bench.work / "tokens" / f"{case.name}.json"
        if self._arm == "eager":
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(figures["tokens"]), encoding="utf-8")
        reference = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else None
        if reference is not None:
            figures["as_eager"] = float(np.mean(np.array(figures["tokens"]) == np.array(reference)))
            exactly = case.dtype == "fp32" and self._arm in _BUNDLE_OF
            assert not exactly or figures["as_eager"] == 1, f"{figures['as_eager']:.1%} of the tokens are eager's; expected all"
        return figures

    def _load(self, device: str) -> DecodeArm:
        case, loaded = self._case, model(self._case.shape, self._case.dtype)
        if self._arm in _BUNDLE_OF:
            folder = bundle(case.shape, case.dtype, _BUNDLE_OF[self._arm], self._bench.work, lambda _: loaded)
            return TideArm(folder, TARGET, case.rows, "exact" if self._arm == "exact" else "full")
        options = None if self._arm == "eager" else {"backend": "eager"} if self._bench.dry else COMPILED
        return TorchArm(loaded.model, MAX_SEQ_LEN, options, device)


@cache
def model(shape: ModelShape, dtype: str) -> LoadedModel:
    """Kept for all arms of a model: random weights of a large one take half a minute to draw."""
    return shape.load(dtype)


def require_cuda_provider(bench: Bench) -> None:
    """Raises NotRun where ONNX Runtime has no CUDA provider, as on an image with the package for processors."""
    import onnxruntime

    if not bench.dry and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise NotRun(
            f"onnxruntime-gpu missing: onnxruntime {onnxruntime.__version__} beside torch {torch.__version__} has no CUDA "
            "provider; docs/gpu-kit.md says how its wheel travels"
        )
