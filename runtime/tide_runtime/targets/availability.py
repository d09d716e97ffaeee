"""Whether each target of a bundle runs on this machine, with the reason if not."""

from __future__ import annotations

from tide_runtime.backends.tensorrt.package import RTX
from tide_runtime.backends.tensorrt.validity import engines_validity
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import TargetInfo
from tide_runtime.targets.gpu_probe import PresentGpu, present_gpu
from tide_runtime.targets.select import DeviceChoice, obstacle


def targets_here(bundle: Bundle) -> dict[str, str]:
    """Target → ``yes``, or the reason why it does not run here or was not checked."""
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
