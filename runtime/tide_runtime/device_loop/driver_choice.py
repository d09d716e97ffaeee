"""Selection of what drives decoding: a loop on the device, with several tokens per launch, or the host; with the reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from tide_runtime.backends.base import Backend, ExecutionContext
from tide_runtime.backends.device.cuda_device import missing_cuda_core
from tide_runtime.backends.device.device import Device
from tide_runtime.backends.device.device_step import DeviceBackend, DeviceContext
from tide_runtime.backends.device.step_graphs import StepGraphs
from tide_runtime.depth.policy import DevicePlan, EnginePolicy, LoadedPolicy
from tide_runtime.device_loop.device_policy import DeviceLoopPolicy, Drivers
from tide_runtime.device_loop.graph_driver import GraphDriver
from tide_runtime.device_loop.host_driver import HostDriver
from tide_runtime.device_loop.loop_kernels import LoopKernels
from tide_runtime.device_loop.row_sampling import DeviceRowSampling
from tide_runtime.errors import TideError
from tide_runtime.plugins import plugin

_TURNS, _WINDOW = 16, 8  # tokens per launch; most pending tokens of a sequence
_MIN_DRIVER = 12080  # CUDA 12.4 introduced conditional nodes, 12.8 those with more than one body


@dataclass
class DriverChoice:
    """What drives decoding.

    Args:
        refusal: the reason known at load time why the host drives a loop or single steps, or None.
        loop: the policy, where it is a loop on the device.
        steps: how single steps are captured; None: the target runs on the processor.
    """

    policy: EnginePolicy
    refusal: str | None = None
    loop: DeviceLoopPolicy | None = None
    steps: StepGraphs | None = None

    @property
    def reason(self) -> str | None:
        """Reason why the host drives, or None. A failing capture is known only after the first launches."""
        return self.refusal or (self.loop.refused if self.loop is not None else None)

    def __str__(self) -> str:
        return f"{self._driver()}{self.steps or ''}"

    def _driver(self) -> str:
        if self.reason is not None:
            return f"host-driven: {self.reason}"
        execution = self.loop.drivers.execution if self.loop is not None else None
        if self.loop is not None and self.loop.plan.drafts is not None:
            return f"device-driven, {_TURNS} passes with drafts a launch"
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
        return f"the driver is for CUDA {found // 1000}.{found % 1000 // 10}, conditional graph nodes need 12.8"
    return None


@dataclass(frozen=True)
class GraphSupport:
    """Functions that return the reason why this machine captures no CUDA graphs, or runs no conditional nodes, or None."""

    no_graphs: Callable[[], str | None] = missing_cuda_core
    no_conditions: Callable[[], str | None] = no_conditions


def capture_steps(
    backend: Backend,
    support: GraphSupport = GraphSupport(),
    load_kernels: Callable[[Device], LoopKernels] = plugin_kernels,
) -> None:
    """Have the contexts of ``backend`` capture whole steps as CUDA graphs, and draw tokens on the device, if it runs on a GPU."""
    device = getattr(backend, "device", None)
    if device is None or device.kind != "cuda" or not cast(DeviceBackend, backend).step_graphs.is_unset:
        return
    on_gpu = cast(DeviceBackend, backend)
    refused = support.no_graphs()
    on_gpu.step_graphs = StepGraphs(None if refused else GraphDriver(device).compile, refused)
    try:
        kernels = load_kernels(device)
    except TideError as error:
        warnings.warn(f"{error}; the host draws sampled tokens", RuntimeWarning, stacklevel=3)
    else:
        on_gpu.row_sampling = DeviceRowSampling(device, kernels, on_gpu.logits_element, on_gpu.manifest.model.vocab_size)


def with_captures(
    backend: Backend, policy: EnginePolicy, make_context: Callable[[], ExecutionContext]
) -> Callable[[], ExecutionContext] | None:
    """``make_context``, but the context has captured the passes that ``policy`` makes the host queue; None: none are."""
    if getattr(backend, "device", None) is None or not cast(DeviceBackend, backend).step_graphs.captures:
        return None
    host = policy.inner if isinstance(policy, DeviceLoopPolicy) else policy

    def make() -> ExecutionContext:
        context = make_context()
        cast(DeviceContext, context).capture_passes(host.lookahead if host.runs_every_layer else 1)
        return context

    return make


def choose_driver(
    policy: LoadedPolicy,
    backend: Backend,
    load_kernels: Callable[[Device], LoopKernels] = plugin_kernels,
    support: GraphSupport = GraphSupport(),
) -> DriverChoice:
    """Wrap ``policy`` in a loop on the device if policy, backend and kernels allow it.

    Args:
        load_kernels: returns the loop's kernels for a device.
        support: what graphs this machine can run.
    """
    device = getattr(backend, "device", None)
    if device is None or device.kind == "cpu":
        return DriverChoice(policy, "the target runs on the processor")
    steps = cast(DeviceBackend, backend).step_graphs
    plan = _device_plan(policy, cast(DeviceBackend, backend))
    if isinstance(plan, str):
        return DriverChoice(policy, plan, steps=steps)
    try:
        kernels = load_kernels(device)
    except TideError as error:
        return DriverChoice(plan.host, str(error), steps=steps)
    graphless = support.no_graphs()

    def no_conditions() -> str | None:
        return support.no_conditions() or kernels.conditions_refused

    # The host then still runs the loop: it reads one flag per condition instead of every exit's outputs.
    refused = graphless or (no_conditions() if plan.exits or plan.drafts is not None else None)
    compile = None if graphless else GraphDriver(device, no_conditions).compile
    drivers = Drivers(HostDriver(device).compile, compile, refused)
    loop = DeviceLoopPolicy(plan, kernels, _TURNS, drivers, _WINDOW)
    return DriverChoice(loop, refused, loop, steps)


def _device_plan(policy: LoadedPolicy, backend: DeviceBackend) -> DevicePlan | str:
    """How a loop on the backend's device runs ``policy``, or why none does."""
    return backend.no_loop or policy.device_plan()
