"""What loops on a GPU are tried on: the demo model, with two exits, for the targets that a device can drive."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tide_runtime.targets.gpu_probe import present_gpu

from benchmarks.gpu.model_shapes import MAX_SEQ_LEN, SHAPES
from benchmarks.gpu.stub_exits import stub_exits
from tide_export.config import ExportConfig
from tide_export.export import write_bundle
from tide_export.progress import ExportProgress
from tide_export.targets import TARGETS
from tide_export.targets.choice import buildable

_DEMO = SHAPES["demo"]
_PROMPT, _TEXTS = 24, 8  # tokens of a prompt; prompts from which the exits' routers learn what half of the tokens is
Prompts = list[list[int]]


@dataclass(frozen=True)
class LoopCase:
    target: str
    dtype: str
    policy: str

    @property
    def name(self) -> str:
        return re.sub(r"\W", "_", f"{self.target}_{self.dtype}_{self.policy}")


def loop_cases(engine: str | None) -> list[LoopCase]:
    """``engine``: the TensorRT target that can be built here, None: there is none, and no exits are evaluated on the device."""
    engines = [LoopCase(engine, "fp32", policy) for policy in ("full", "exit")] if engine is not None else []
    return [LoopCase("cuda", "fp16", "full"), *engines]


def engine_target() -> str | None:
    """TensorRT's own target for the GPU present before TensorRT-RTX's."""
    gpu = present_gpu()
    engines = (TARGETS[name] for name in buildable("fp32") if TARGETS[name].backend.startswith("tensorrt"))
    fitting = [target for target in engines if gpu is not None and gpu.compute in target.machine.compute]
    return min(fitting, key=lambda target: target.backend).name if fitting else None


def demo_prompts(rows: int) -> Prompts:
    return np.random.default_rng(0).integers(3, _DEMO.config().vocab_size, (rows, _PROMPT)).tolist()


def write_demo(case: LoopCase, folder: Path) -> Path:
    """The demo model for a case, with exits after a third and two thirds of its layers."""
    loaded = _DEMO.load(case.dtype)
    layers = loaded.model.config.num_hidden_layers
    calibration = stub_exits(loaded, [layers // 3, 2 * layers // 3], demo_prompts(_TEXTS))
    config = ExportConfig(case.dtype, "auto", MAX_SEQ_LEN, targets=(case.target,), verify=False)
    write_bundle(loaded, folder, config, ExportProgress(quiet=True), calibration)
    return folder
