"""What this machine has for TIDE's targets, and what each target lacks here; needs nothing but the base installation."""

from __future__ import annotations

import ctypes
import runpy
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from tide_runtime.backends.onnxruntime.cuda_libraries import INSTALL_PROVIDER
from tide_runtime.backends.onnxruntime.distribution import distribution, installed_distributions
from tide_runtime.bundle.architectures import ARCHITECTURES, onnxruntime_compute
from tide_runtime.bundle.manifest import PAD_ATTENTION, TargetInfo
from tide_runtime.targets.gpu_probe import PresentGpu, driver_cuda, present_gpu, runs_code_for
from tide_runtime.targets.target_choice import CPU, CUDA, DeviceChoice, obstacle

# What is shown → the distributions that bring it.
_PACKAGES = {
    "TensorRT": ("tensorrt-cu13", "tensorrt-cu12", "tensorrt"),
    "TensorRT-RTX": ("tensorrt-rtx",),
    "NVRTC": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "cuda-core": ("cuda-core",),
    "cuda-bindings": ("cuda-bindings",),
}
_ON_PROCESSORS = ("onnxruntime-cpu", "torch")  # backends that run without a GPU
_CUDA_13 = 13000
_DRIVER_13 = "install an NVIDIA driver of release 580 or newer"


def every_target() -> dict[str, TargetInfo]:
    """Name → backend and GPUs of every target that this runtime runs, in the order of ``tide-export --list-targets``."""
    found = {CPU: _target("onnxruntime-cpu"), CUDA: _target("onnxruntime-cuda", onnxruntime_compute()), "torch": _target("torch")}
    engines = [one for one in ARCHITECTURES if not one.ptx]
    rtx = [one.compute for one in engines if one.rtx]
    found |= {f"rtx-sm_{compute}": _target("tensorrt-rtx", [compute]) for compute in rtx}
    found["rtx-ampere+"] = _target("tensorrt-rtx", [compute for compute in rtx if compute >= 80])
    return found | {f"trt-sm_{one.compute}": _target("tensorrt", [one.compute]) for one in engines}


def _target(backend: str, compute: Iterable[int] = ()) -> TargetInfo:
    return TargetInfo(backend, {}, None, {PAD_ATTENTION: 1} if backend == "onnxruntime-cpu" else {}, list(compute))


def machine_facts() -> dict[str, Any]:
    """Packages, driver and GPUs as JSON values; None: not there."""
    installed = installed_distributions()
    driver = driver_cuda()
    name, release = distribution(installed)
    installed = installed or {name: release}
    return {
        "packages": {
            **{one: installed.get(one) for one in dict.fromkeys(["onnxruntime", "onnxruntime-gpu", *installed])},
            **{title: _installed(names) for title, names in _PACKAGES.items()},
            "torch": _torch(),
        },
        "imported_onnxruntime": f"{name} {release}",
        "driver_cuda": None if driver is None else f"{driver // 1000}.{driver % 1000 // 10}",
        "gpus": [asdict(gpu) for gpu in present_gpus()],
    }


def _installed(distributions: Iterable[str]) -> str | None:
    """``name release`` of every one of these that is installed, or None."""
    found = []
    for name in distributions:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found) or None


def _torch() -> str | None:
    """The release, and for which CUDA; read from a file of the package, whose import takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    cuda = facts.get("cuda")
    return f"{facts['__version__']}, {f'built for CUDA {cuda}' if cuda else 'built without CUDA'}"


def present_gpus() -> list[PresentGpu]:
    return [gpu for gpu in takewhile(lambda gpu: gpu is not None, map(present_gpu, count())) if gpu is not None]


def warnings_of(facts: dict[str, Any]) -> list[str]:
    """What is wrong with the installation, whatever the target, each with the command that mends it."""
    found = []
    both = [name for name in ("onnxruntime", "onnxruntime-gpu") if facts["packages"].get(name)]
    if len(both) == 2 and not facts["imported_onnxruntime"].startswith("onnxruntime-gpu") and facts["gpus"]:
        found.append(f"onnxruntime's files lie over those of onnxruntime-gpu, which has the CUDA kernels; {INSTALL_PROVIDER}")
    if facts["gpus"] and facts["packages"]["NVRTC"] is None and not _loads("libnvrtc.so.13"):
        found.append("decode loops cannot be compiled, so the host drives every token; pip install 'tide-llm[kernels]'")
    return found


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def lacking(target: TargetInfo, gpus: Iterable[PresentGpu], driver: int | None) -> list[str]:
    """What ``target`` lacks on a machine with ``gpus``, each with the command or the machine that has it; empty: it runs."""
    gpus = list(gpus)
    if target.backend in _ON_PROCESSORS and not gpus:
        return _reasons(obstacle(target, DeviceChoice(), None))
    fitting = next((gpu for gpu in gpus if not target.compute or _fits(target, gpu)), None)
    if target.backend == "onnxruntime-cpu":
        return _reasons(obstacle(target, DeviceChoice(), None))
    found = []
    if fitting is None:
        found.append(_wanted_gpu(target, gpus))
    elif target.backend != "torch" and target.compute != [70] and driver is not None and driver < _CUDA_13:
        found.append(f"its libraries are for CUDA 13, the driver is for {driver // 1000}.{driver % 1000 // 10}; {_DRIVER_13}")
    # The packages are looked for as if such a GPU were here.
    return found + _reasons(obstacle(target, DeviceChoice(), fitting or PresentGpu("", (target.compute or [90])[-1])))


def _fits(target: TargetInfo, gpu: PresentGpu) -> bool:
    if target.backend == "onnxruntime-cuda":
        return runs_code_for(target.compute, gpu.compute)
    return gpu.compute in target.compute


def _wanted_gpu(target: TargetInfo, gpus: list[PresentGpu]) -> str:
    devices = "; ".join(one.devices for one in ARCHITECTURES if one.compute in target.compute and not one.ptx)
    here = ", ".join(f"{gpu.name} (sm_{gpu.compute})" for gpu in gpus) or "none with a driver; check with nvidia-smi"
    return f"a GPU of the kind {devices}; here: {here}"


def _reasons(reason: str | None) -> list[str]:
    return [] if reason is None else [reason]
