"""Selection of the best target of a bundle for the GPU that is present, or for a requested device, and what runs here at all."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from tide_runtime.backends.device.cuda_device import missing_cuda_core
from tide_runtime.backends.tensorrt.package import RTX, load_module
from tide_runtime.backends.tensorrt.validity import engines_validity
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.architectures import ARCHITECTURES, onnxruntime_compute
from tide_runtime.bundle.manifest import Manifest, TargetInfo
from tide_runtime.errors import ParamsError, TargetError
from tide_runtime.targets.gpu_probe import PresentGpu, present_gpu, runs_code_for

AUTO, CPU, CUDA = "auto", "cpu", "cuda"
_CPU_BACKEND, _TORCH = "onnxruntime-cpu", "torch"
_MIN_COMPUTE_BF16, _MIN_COMPUTE_TORCH = 80, 70
# Best first: engines compiled for a GPU before backends that select kernels at run time. On a processor torch comes last.
_PREFERRED = ("tensorrt", "tensorrt-rtx", _TORCH, "onnxruntime-cuda", _CPU_BACKEND)


@dataclass(frozen=True)
class DeviceChoice:
    """A requested device: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``.

    ``kind``: the part before the colon; ``ordinal``: the GPU number.
    """

    kind: str = AUTO
    ordinal: int = 0

    @staticmethod
    def parse(text: str) -> DeviceChoice:
        """Parse a device option. Raises ParamsError for any other text."""
        kind, colon, number = text.partition(":")
        if kind not in (AUTO, CPU, CUDA) or (colon and not (kind == CUDA and number.isdigit())):
            raise ParamsError(f"device is {text!r}; set it to auto, cpu, cuda, or cuda:1 for the second GPU")
        return DeviceChoice(kind, int(number or 0))


def choose_target(manifest: Manifest, device: DeviceChoice) -> str:
    """Name of the best target for ``device``; ``auto`` prefers the GPU to the processor.

    Warns when a GPU is present but none of the bundle's GPU targets can run.

    Raises:
        TargetError: no target can run; the message lists the targets, the machine, and the command that adds a target.
    """
    gpu = present_gpu(device.ordinal) if device.kind != CPU else None
    obstacles = {name: obstacle(target, device, gpu) for name, target in manifest.targets.items()}
    fitting = sorted((name for name, why in obstacles.items() if why is None), key=lambda n: _rank(manifest.targets[n], gpu))
    if not fitting:
        raise TargetError(_nothing_fits(manifest, device, gpu, obstacles))
    chosen = fitting[0]
    if gpu is not None and manifest.targets[chosen].backend == _CPU_BACKEND:
        reasons = [f"{name}: {why}" for name, why in obstacles.items() if why is not None]
        if reasons:
            warnings.warn(f"running on the processor beside a {gpu.name}: {'; '.join(reasons)}", RuntimeWarning, stacklevel=3)
    return chosen


def obstacle(target: TargetInfo, device: DeviceChoice, gpu: PresentGpu | None) -> str | None:
    """Reason why ``target`` cannot run on ``device``, or None."""
    if target.backend not in _PREFERRED:
        return f"needs the backend {target.backend!r}, this runtime has: {', '.join(_PREFERRED)}; upgrade tide-llm"
    if target.backend == _CPU_BACKEND:
        return "runs on the processor" if device.kind == CUDA else _old_onnxruntime(target)
    if target.backend == _TORCH:
        return _torch_obstacle(device, gpu)
    if device.kind == CPU:
        return "needs a GPU"
    if gpu is None:
        return f"needs a GPU; here is no GPU number {device.ordinal} with a driver"
    if target.backend == "onnxruntime-cuda":  # the kernels are ONNX Runtime's, whatever the bundle says
        if not runs_code_for(onnxruntime_compute(), gpu.compute):
            return f"onnxruntime-gpu has machine code for {_listed(onnxruntime_compute())} only"
    elif target.compute and gpu.compute not in target.compute:
        return f"was compiled for {_listed(target.compute)}"
    return _missing_package(target)


def _old_onnxruntime(target: TargetInfo) -> str | None:
    from tide_runtime.backends.onnxruntime.distribution import CPU_RELEASE, distribution, runs_padded_attention

    if not target.pads_attention or runs_padded_attention():
        return None
    name, release = distribution()
    return f"needs ONNX Runtime {'.'.join(map(str, CPU_RELEASE))} or newer, here is {name} {release}"


def _listed(compute: Iterable[int]) -> str:
    return ", ".join(f"sm_{number}" for number in compute)


def _missing_package(target: TargetInfo) -> str | None:
    if (no_core := missing_cuda_core()) is not None:
        return no_core
    if target.backend == "onnxruntime-cuda":
        import onnxruntime

        from tide_runtime.backends.onnxruntime.cuda_libraries import INSTALL_PROVIDER, missing_cuda_libraries

        if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            return f"this ONNX Runtime has no CUDA provider; {INSTALL_PROVIDER}"
        missing = missing_cuda_libraries()
        return f"{'; '.join(missing)}; pip install 'tide-llm[cuda]'" if missing else None
    try:
        load_module(target)
    except TargetError as error:
        return str(error)
    return None


def _torch_obstacle(device: DeviceChoice, gpu: PresentGpu | None) -> str | None:
    """Reason why target ``torch`` cannot run on ``device``, or None."""
    if missing := [name for name in ("torch", "onnx") if not _is_installed(name)]:
        return f"the package {missing[0]} is not installed; pip install 'tide-llm[torch]'"
    if gpu is None:
        return f"there is no GPU number {device.ordinal} with a driver" if device.kind == CUDA else None
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} has no CUDA, and here is a {gpu.name}; pip install a torch with CUDA (pytorch.org)"
    return missing_cuda_core()


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def _rank(target: TargetInfo, gpu: PresentGpu | None) -> tuple[int, int]:
    """Sort key: backend, then engines for a single architecture before portable ones."""
    last = target.backend == _TORCH and gpu is None
    return len(_PREFERRED) if last else _PREFERRED.index(target.backend), len(target.compute)


def _nothing_fits(manifest: Manifest, device: DeviceChoice, gpu: PresentGpu | None, obstacles: dict[str, str | None]) -> str:
    machine = "a processor" if gpu is None else f"a {gpu.name}, sm_{gpu.compute}"
    has = "; ".join(f"{name} ({why})" for name, why in obstacles.items()) or "no target"
    return (
        f"the bundle has nothing that runs on {device.kind} here. It has: {has}. The machine is {machine}. "
        f"{_advice(manifest, device, gpu)} (tide-export --list-targets shows all)"
    )


def _advice(manifest: Manifest, device: DeviceChoice, gpu: PresentGpu | None) -> str:
    wanted = _targets_for(gpu) if gpu is not None else [CUDA if device.kind == CUDA else CPU]
    if not wanted:
        return "There is no target for this GPU; load with device cpu, from a bundle with --target cpu"
    targets = " ".join(f"--target {name}" for name in wanted)
    return (
        f"Add a target: tide-export {manifest.model.source} --out DIR {targets} --dtype {_dtype_for(wanted, gpu, manifest.dtype)}"
    )


def _targets_for(gpu: PresentGpu) -> list[str]:
    """Names of the targets that run on ``gpu``, those that any machine can build first."""
    names = [CUDA] if runs_code_for(onnxruntime_compute(), gpu.compute) else []
    own = next((one for one in ARCHITECTURES if one.compute == gpu.compute and not one.ptx), None)
    if own is not None and own.rtx:
        names.append(f"rtx-sm_{own.compute}")
    if own is not None:
        names.append(f"trt-sm_{own.compute}")
    return [*names, *([_TORCH] if gpu.compute >= _MIN_COMPUTE_TORCH else [])]


def _dtype_for(targets: list[str], gpu: PresentGpu | None, dtype: str) -> str:
    """The bundle's dtype, or a substitute for bf16 where ``targets`` or ``gpu`` lack it."""
    if dtype != "bf16":
        return dtype
    if targets == [CPU]:
        return "fp32"
    return "fp16" if gpu is not None and gpu.compute < _MIN_COMPUTE_BF16 else dtype


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
