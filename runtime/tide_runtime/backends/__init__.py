"""Registry of backends by name; each target of a bundle names the backend that runs it."""

from __future__ import annotations

from collections.abc import Callable

from tide_runtime.backends.base import Backend
from tide_runtime.backends.onnxruntime.threads import ThreadOptions
from tide_runtime.bundle import Bundle
from tide_runtime.errors import TargetError


def _onnxruntime(bundle: Bundle, target: str, threads: ThreadOptions, kind: str, ordinal: int, share: bool) -> Backend:
    from tide_runtime.backends.onnxruntime.cpu import OnnxRuntimeBackend

    return OnnxRuntimeBackend.load(bundle, target, threads, share)


def _onnxruntime_cuda(bundle: Bundle, target: str, threads: ThreadOptions, kind: str, ordinal: int, share: bool) -> Backend:
    from tide_runtime.backends.device.cuda_device import CudaDevice
    from tide_runtime.backends.onnxruntime.cuda import OnnxRuntimeCudaBackend, cuda_provider
    from tide_runtime.backends.required_memory import require_room

    device = CudaDevice(ordinal)
    require_room(bundle, target, device)
    return OnnxRuntimeCudaBackend.load(bundle, target, threads, device, cuda_provider(device))


def _tensorrt(bundle: Bundle, target: str, threads: ThreadOptions, kind: str, ordinal: int, share: bool) -> Backend:
    from tide_runtime.backends.device.cuda_device import CudaDevice
    from tide_runtime.backends.required_memory import require_room
    from tide_runtime.backends.tensorrt.backend import TensorRtBackend

    device = CudaDevice(ordinal)
    require_room(bundle, target, device)
    return TensorRtBackend.load(bundle, target, device)


def _torch(bundle: Bundle, target: str, threads: ThreadOptions, kind: str, ordinal: int, share: bool) -> Backend:
    try:
        from tide_runtime.backends.torch.backend import TorchBackend
    except ImportError as error:
        raise TargetError(f"target {target!r} needs torch and onnx ({error}): pip install 'tide-llm[torch]'") from error
    return TorchBackend.load(bundle, target, threads, kind, ordinal)


BACKENDS: dict[str, Callable[[Bundle, str, ThreadOptions, str, int, bool], Backend]] = {
    "onnxruntime-cpu": _onnxruntime,
    "onnxruntime-cuda": _onnxruntime_cuda,
    "tensorrt-rtx": _tensorrt,
    "tensorrt": _tensorrt,
    "torch": _torch,
}


def load_backend(
    bundle: Bundle, target: str, threads: ThreadOptions, ordinal: int = 0, kind: str = "auto", share_weights: bool = False
) -> Backend:
    """Load ``target`` of the bundle; ``ordinal`` selects the GPU of a GPU target.

    Args:
        kind: ``auto``, ``cuda`` or ``cpu``, for targets that run on both.
        share_weights: see `EngineOptions`.

    Raises TargetError when the bundle lacks the target or this runtime cannot run it.
    """
    targets = bundle.manifest.targets
    if target not in targets:
        raise TargetError(
            f"the bundle has no target {target!r}, it has: {', '.join(targets)}; add it with tide-export --target {target}"
        )
    backend = targets[target].backend
    if backend not in BACKENDS:
        raise TargetError(
            f"target {target!r} needs the backend {backend!r}, this runtime has: {', '.join(BACKENDS)}; upgrade tide-llm"
        )
    if bundle.manifest.is_recurrent and backend != "onnxruntime-cpu":
        raise TargetError(
            f"target {target!r} cannot run this model: its recurrent layers keep states, which this runtime holds in host memory "
            "only; use target cpu"
        )
    return BACKENDS[backend](bundle, target, threads, kind, ordinal, share_weights)
