"""Selection of what drives decoding: a loop on the device, with several tokens per launch, or the host; with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from tide_runtime.backends.base import Backend
from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.device_step import DeviceBackend
from tide_runtime.depth.policy import EnginePolicy, LoadedPolicy
from tide_runtime.device_loop.decode_loop import LoopExit
from tide_runtime.device_loop.graph_driver import GraphDriver
from tide_runtime.device_loop.host_driver import HostDriver
from tide_runtime.device_loop.loop_kernels import LoopKernels
from tide_runtime.device_loop.policy import DrivenDepth, Drivers
from tide_runtime.errors import TideError
from tide_runtime.plugins import plugin

_TURNS, _WINDOW = 16, 8  # tokens per launch; most pending tokens of a sequence
_MIN_DRIVER = 12040  # CUDA 12.4 introduced conditional nodes
# Of cuda-core: 1.1 cannot embed a graph where a body begins, 1.0 lists no captured nodes, earlier ones name methods otherwise.
_MIN_CORE = (1, 2)


@dataclass
class Drive:
    """``policy``: decodes. ``refusal``: the reason known at load time why the host drives a loop or single steps, or None."""

    policy: EnginePolicy
    refusal: str | None = None

    @property
    def reason(self) -> str | None:
        """Reason why the host drives, or None. A failing capture is known only after the first launches."""
        return self.refusal or (self.policy.refused if isinstance(self.policy, DrivenDepth) else None)

    def __str__(self) -> str:
        if self.reason is not None:
            return f"host-driven: {self.reason}"
        execution = self.policy.drivers.execution if isinstance(self.policy, DrivenDepth) else None
        if execution is None or execution.refusal is None:
            return f"device-driven, {_TURNS} tokens a launch"
        return f"device-driven, {_TURNS} launches of one token at once: {execution.refusal}"


def plugin_kernels(device: Device) -> LoopKernels:
    """The kernels of tide_plugins for ``device``, built on first use. Raises TideError when there are none for it."""
    return cast(LoopKernels, plugin("loop_kernels")(device))


def no_conditions() -> str | None:
    """Reason why the CUDA driver has no conditional graph nodes, or None."""
    from cuda.bindings import driver

    error, found = driver.cuDriverGetVersion()
    if error != driver.CUresult.CUDA_SUCCESS:
        return f"the driver does not say its version ({error.name})"
    if found < _MIN_DRIVER:
        return f"the driver is for CUDA {found // 1000}.{found % 1000 // 10}, conditional graph nodes need 12.4"
    return None


def no_graphs() -> str | None:
    """Reason why no CUDA graph can be captured with the cuda-core installed here, or None."""
    from cuda.core import __version__ as found

    least = ".".join(map(str, _MIN_CORE))
    if tuple(int(part) for part in found.split(".")[:2]) < _MIN_CORE:
        return f"cuda-core {found} is installed, CUDA graphs need {least} or newer: pip install --upgrade cuda-core"
    return None


@dataclass(frozen=True)
class GraphSupport:
    """Functions that return the reason why this machine captures no CUDA graphs, or runs no conditional nodes, or None."""

    no_graphs: Callable[[], str | None] = no_graphs
    no_conditions: Callable[[], str | None] = no_conditions


def choose_drive(
    policy: LoadedPolicy,
    backend: Backend,
    load_kernels: Callable[[Device], LoopKernels] = plugin_kernels,
    support: GraphSupport = GraphSupport(),
) -> Drive:
    """Wrap ``policy`` in a loop on the device if policy, backend and kernels allow it.

    Args:
        load_kernels: returns the loop's kernels for a device.
        support: what graphs this machine can run.
    """
    device = getattr(backend, "device", None)
    if device is None:
        return Drive(policy, "the target runs on the processor")
    on_device = cast(DeviceBackend, backend)
    reason = _why_on_host(policy, on_device)
    if reason is not None:
        return Drive(policy, reason)
    exits = [LoopExit(early_exit, threshold) for early_exit, threshold in policy.for_device_loop()]
    try:
        kernels = load_kernels(device)
    except TideError as error:
        return Drive(policy, str(error))
    graphless = support.no_graphs()

    def no_conditions() -> str | None:
        return support.no_conditions() or kernels.conditions_refused

    # The host then still runs the loop: it reads one flag per condition instead of every exit's outputs.
    refused = graphless or (no_conditions() if exits else None)
    compile = None if graphless else GraphDriver(device, no_conditions).compile
    drivers = Drivers(HostDriver(device).compile, compile, refused)
    return Drive(DrivenDepth(policy, kernels, _TURNS, drivers, exits, _WINDOW), refused)


def _why_on_host(policy: LoadedPolicy, backend: DeviceBackend) -> str | None:
    if backend.copies_caches:
        return "its engines do not update caches in place, and the copies back are queued from the host"
    reason = policy.why_on_host(backend.pads_sequences)
    if reason is None and not backend.pads_sequences and backend.manifest.dtype == "fp32":
        return "attention in fp32 takes a mask that the host fills (ONNX Runtime has no fused kernel for it)"
    return reason
