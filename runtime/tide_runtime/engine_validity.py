"""Whether targets run on this machine: what keeps them from it, and what TensorRT-RTX says of its engines' first bytes.

No engine is loaded and nothing compiled. TensorRT itself has no such question: its engines are checked when they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tide_runtime.bundle import Bundle
from tide_runtime.choose_target import DeviceChoice, obstacle
from tide_runtime.manifest import TargetInfo
from tide_runtime.present_gpu import PresentGpu, present_gpu
from tide_runtime.tensorrt_module import RTX

VALID = "valid"
SLOWER = f"{VALID}, slower than one built here"


def targets_here(bundle: Bundle) -> dict[str, str]:
    """Target → whether it runs here, why not, or why that was not checked."""
    gpu = present_gpu()
    return {name: _here(bundle, target, gpu) for name, target in bundle.manifest.targets.items()}


def _here(bundle: Bundle, target: TargetInfo, gpu: PresentGpu | None) -> str:
    if target.engines and gpu is None:
        return "not checked: no GPU with a driver here"
    why_not = obstacle(target, DeviceChoice(), gpu)
    if why_not is not None:
        return f"no: {why_not}"
    if not target.engines:
        return "yes"
    if target.backend != "tensorrt-rtx":
        return "not checked: TensorRT tells when it loads them"
    return engines_validity(RTX.imported(), (bundle.path(file) for file in target.graphs.values()))


def engines_validity(trt: Any, files: Iterable[Path]) -> str:
    """``valid``, that the first of ``files`` that is slower here is so, or what is wrong with the first that cannot be loaded.

    Reasons are in TensorRT-RTX's words.

    Args:
        trt: the module ``tensorrt_rtx``.
    """
    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    answer = VALID
    for path in files:
        with path.open("rb") as file:
            validity, diagnostics = runtime.get_engine_validity(file.read(runtime.engine_header_size))
        if validity == trt.EngineValidity.INVALID:
            return f"invalid: {path.name}: {_reasons(trt, diagnostics)}"
        if validity == trt.EngineValidity.SUBOPTIMAL and answer == VALID:  # runs; another file may still be invalid
            answer = f"{SLOWER}: {path.name}: {_reasons(trt, diagnostics)}"
    return answer


def _reasons(trt: Any, diagnostics: int) -> str:
    members = trt.EngineInvalidityDiagnostics.__members__
    reasons = [name.lower().replace("_", " ") for name, bit in members.items() if diagnostics & int(bit)]
    return ", ".join(reasons) or "no reason given"
