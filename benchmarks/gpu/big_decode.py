"""A model of 1B parameters with random weights on a GPU: HuggingFace eager, a captured graph and compiled, against target `torch`
under `full` and under `exit` with every exit taken, or none. A random model's tokens say nothing; times do.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import cache, partial
from statistics import median
from typing import Any

import numpy as np
import torch
from tide_bench.arms.base import Arm, ArmDevice
from tide_bench.arms.compiled import CompileArm
from tide_bench.arms.cuda_graph import CudaGraphArm
from tide_bench.arms.eager import EagerArm
from tide_runtime import DepthOptions, Engine, EngineOptions, GenerationParams
from transformers import AutoModelForCausalLM

from benchmarks.gpu.carried_bundle import unpack
from benchmarks.gpu.kit.case import Bench, Figures, KitCase
from benchmarks.gpu.model_shapes import SHAPES, ModelShape

TARGET = "torch"
_PROMPT, _NEW, _REPEATS = 64, 64, 3
_SMALL = ModelShape("small", ("fp16",), 2, 128, 4, 2, 256, 512)  # what a dry run decodes with HuggingFace
# Policy and threshold of an arm: 0 takes the first exit, 1 none.
_TIDE_ARMS: dict[str, tuple[str, float | None]] = {
    "tide_full": ("full", None),
    "tide_never_exits": ("exit", 1.0),
    "tide_always_exits": ("exit", 0.0),
}


def kit_cases(bench: Bench, argument: str) -> Iterator[KitCase]:
    """``argument``: dtype and sequences at once, such as ``fp16 1``. Dense baselines are measured with dense weights only."""
    dtype, rows = argument.split()
    big = _Big(bench, dtype, int(rows))
    yield KitCase("unpacked", big.unpacked, dict)
    arms = {name: partial(big.tide, name) for name in _TIDE_ARMS}
    if dtype == "fp16":
        arms = {"hf_eager": partial(big.hf, EagerArm), "hf_graph": partial(big.hf, CudaGraphArm), **arms}
        if rows == "1":  # compiling takes longer than all else
            arms["hf_compile"] = partial(big.hf, CompileArm)
    for name, run in arms.items():
        yield KitCase(name, run, run if name.startswith("hf") else dict)


class _Big:
    def __init__(self, bench: Bench, dtype: str, rows: int) -> None:
        self._bench, self._dtype, self._rows = bench, dtype, rows
        self._prompt, self._new, self._repeats = (4, 4, 1) if bench.dry else (_PROMPT, _NEW, _REPEATS)

    @property
    def _folder(self) -> Any:
        name = f"1b_{self._dtype}"
        return unpack(self._bench.carried / name, self._bench.work / "bundles" / name, self._bench.device)

    def unpacked(self) -> Figures:
        """Unpack the bundle; random weights are drawn on the GPU."""
        return {"bytes": sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())}

    def hf(self, kind: Callable[..., Arm]) -> Figures:
        with torch.compiler.set_stance("force_eager" if self._bench.dry else "default"):
            arm = kind(self._model, ArmDevice(self._bench.device))
            return self._measured(lambda new: arm.generate(self._given, new).decode_ms_per_token)

    def tide(self, name: str) -> Figures:
        """ms a token, what drives, bytes on the GPU, and of `exit` the mean depth."""
        _model.cache_clear()
        release_memory()
        policy, threshold = _TIDE_ARMS[name]
        options = EngineOptions(
            target=TARGET,
            policy=policy,
            depth=DepthOptions(threshold=threshold),
            max_batch=self._rows,
            verify=False,
            device=self._bench.device,
        )
        depths = list[int]()

        def decode(new: int) -> float:
            made = engine.generate(self._given, GenerationParams(max_new_tokens=new, ignore_eos=True))
            depths[:] = [depth for row in made for depth in row.stats.token_depths]
            return 1e3 * max(row.stats.decode_time for row in made) / (new - 1)

        with Engine.load(self._folder, options) as engine:
            figures = self._measured(decode)
            figures |= {"drive": str(engine.drive), "mean_depth": sum(depths) / len(depths) if depths else None}
            if not self._bench.dry:
                free, total = torch.cuda.mem_get_info()
                figures["gib_used"] = (total - free) / 2**30
        release_memory()
        return figures

    def _measured(self, decode: Callable[[int], float]) -> Figures:
        """After a run that compiles, captures and allocates."""
        first = decode(self._new)
        ms = [decode(self._new) for _ in range(self._repeats)]
        return {"ms": median(ms), "tokens_per_s": 1e3 * self._rows / median(ms), "all_ms": ms, "first_ms": first}

    @property
    def _given(self) -> list[list[int]]:
        vocab = self._shape.vocab
        return np.random.default_rng(0).integers(3, vocab, (self._rows, self._prompt)).tolist()

    @property
    def _shape(self) -> ModelShape:
        return _SMALL if self._bench.dry else SHAPES["1b"]

    @property
    def _model(self) -> Any:
        return _model(self._shape, self._bench.device)


@cache
def _model(shape: ModelShape, device: str) -> Any:
    """Weights are drawn where they stay."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=torch.float16 if device == "cuda" else torch.float32)
    return model.eval()


def release_memory() -> None:
    """Give back what arms that are closed held on the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
