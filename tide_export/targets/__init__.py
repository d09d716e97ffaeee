"""Registry of targets by name. A new target needs a file in this folder and an entry here."""

from __future__ import annotations

from tide_runtime.errors import TargetError

from tide_export.targets.base import Target
from tide_export.targets.onnxruntime import CPU, CUDA
from tide_export.targets.rtx import RTX_TARGETS
from tide_export.targets.torch import TORCH
from tide_export.targets.trt import TRT_TARGETS

TARGETS: dict[str, Target] = {target.name: target for target in (CPU, CUDA, TORCH, *RTX_TARGETS, *TRT_TARGETS)}


def find_target(name: str, dtype: str) -> Target:
    """The target ``name``. Raises TargetError if there is none or it has no kernels for ``dtype``."""
    if name not in TARGETS:
        raise TargetError(f"there is no target {name!r}; choose from: {', '.join(TARGETS)}, or auto or all")
    target = TARGETS[name]
    if dtype not in target.dtypes:
        raise TargetError(f"target {name} has no {dtype} kernels; use --dtype {' or '.join(target.dtypes)}")
    return target
