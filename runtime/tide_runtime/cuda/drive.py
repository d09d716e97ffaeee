"""Who drives decoding: the device, several tokens a launch, where driver, kernels and bundle allow it; else the host. And why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from tide_runtime.backends.base import Backend
from tide_runtime.backends.device_step import DeviceBackend
from tide_runtime.cuda.decode_loop import LoopExit
from tide_runtime.cuda.graph_driver import GraphDriver
from tide_runtime.cuda.host_driver import HostDriver
from tide_runtime.cuda.plugin_kernels import PluginLoopKernels
from tide_runtime.errors import TideError
from tide_runtime.policies.base import DepthPolicy
from tide_runtime.policies.driven import DrivenDepth, Drivers
from tide_runtime.policies.exit import ExitDepth
from tide_runtime.policies.full import FullDepth

if TYPE_CHECKING:
    from tide_plugins.launch.kernel_library import KernelLibrary

_TURNS, _WINDOW = 16, 8  # tokens a launch; most tokens that wait for the layers they skipped
_LEAST_DRIVER = 12040  # conditional nodes came with CUDA 12.4
_LEAST_KERNELS = 13  # kernels for older GPUs are compiled by CUDA 12 without conditions


@dataclass
class Drive:
    """``policy``: what to decode with. ``refusal``: why the host drives from the start, the same loop or single steps."""

    policy: DepthPolicy
    refusal: str | None = None

    @property
    def reason(self) -> str | None:
        """Why the host drives, None: the device does. A driver that cannot capture a loop says so at its first launches."""
        return self.refusal or (self.policy.refused if isinstance(self.policy, DrivenDepth) else None)

    def __str__(self) -> str:
        return f"device-driven, {_TURNS} tokens a launch" if self.reason is None else f"host-driven: {self.reason}"


def choose_drive(policy: DepthPolicy, backend: Backend) -> Drive:
    """Let the device drive ``policy`` if it can."""
    device = getattr(backend, "device", None)
    if device is None:
        return Drive(policy, "the target runs on the processor")
    on_device = cast(DeviceBackend, backend)
    reason = _why_not_policy(policy, on_device)
    if reason is None and isinstance(policy, ExitDepth):
        policy.asks_always = True  # as a loop on the device does: the same tokens must come where the host fills in for it
    if reason is not None:
        return Drive(policy, reason)
    try:
        library = _library(device)
    except TideError as error:
        return Drive(policy, str(error))
    # The same loop: from the host it waits for one flag at each condition, not for the tokens and scores of every exit.
    reason = _why_not_driver() or _why_not_kernels(library)
    drivers = Drivers(HostDriver(device).compile, GraphDriver(device).compile if reason is None else None)
    loop = DrivenDepth(policy, PluginLoopKernels(library, device.stream), _TURNS, drivers, _exits_of(policy), _WINDOW)
    return Drive(loop, reason)


def _why_not_policy(policy: DepthPolicy, backend: DeviceBackend) -> str | None:
    if backend.copies_caches:
        return "its engines do not update caches in place, and the copies back are queued from the host"
    if isinstance(policy, ExitDepth):
        return _why_not_exit(policy, backend)
    if not isinstance(policy, FullDepth):
        return f"policy {policy.name} decides on the host"
    if not backend.pads_rows and backend.manifest.dtype == "fp32":
        return "attention in fp32 takes a mask that the host fills (ONNX Runtime has no fused kernel for it)"
    return None


def _why_not_exit(policy: ExitDepth, backend: DeviceBackend) -> str | None:
    if not backend.pads_rows:
        return "ONNX Runtime's attention takes several tokens of one row only; exits are asked from the host"
    if any(stop.exit.info.tail_layers for stop in policy.stops):
        return "an exit's tail attends to keys and values that a loop on the device settles sooner than the host"
    if policy.options.max_exit_streak or policy.options.kv != "deferred":
        return "max_exit_streak and propagated keys and values are the host's"
    return None


def _exits_of(policy: DepthPolicy) -> list[LoopExit]:
    return [LoopExit(stop.exit, stop.threshold) for stop in policy.stops] if isinstance(policy, ExitDepth) else []


def _why_not_driver() -> str | None:
    from cuda.bindings import driver

    error, version = driver.cuDriverGetVersion()
    if error != driver.CUresult.CUDA_SUCCESS:
        return f"the driver does not say its version ({error.name})"
    if version < _LEAST_DRIVER:
        return f"the driver is for CUDA {version // 1000}.{version % 1000 // 10}, conditional graph nodes need 12.4"
    return None


def _why_not_kernels(library: KernelLibrary) -> str | None:
    if library.architecture.cuda < _LEAST_KERNELS:
        return f"kernels for {library.architecture.name} set no graph conditions"
    return None


def _library(device: Any) -> KernelLibrary:
    """Kernels for the GPU, built when a loop first asks for them. Raises TideError when there are none for it."""
    from tide_plugins.launch.cuda_driver import CudaDriver
    from tide_plugins.launch.kernel_library import KernelLibrary

    return KernelLibrary(CudaDriver(device.ordinal))
