"""A launch with checked arguments, which costs one driver call per kernel."""

from __future__ import annotations

from ctypes import Structure
from dataclasses import dataclass, replace
from typing import Any

from tide_runtime.errors import TargetError

from tide_plugins.launch.kernel_library import MIN_CUDA_CONDITIONS, KernelLibrary
from tide_plugins.launch.stream_handle import stream_handle
from tide_plugins.plans import LaunchPlan


@dataclass(frozen=True)
class Step:
    """One kernel of a prepared launch. ``arguments``: fields that it takes one by one; none: it takes the struct by value."""

    entry: Any
    plan: LaunchPlan
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class PreparedLaunch:
    """Kernels that run in sequence with the same parameters. Keeps the tensors and its scratch memory alive.

    Launches share the scratch memory, so enqueue on one stream, or after the last launch is done. Enqueueing does not allocate or
    synchronize, so it can be captured in a CUDA graph.
    """

    library: KernelLibrary
    steps: tuple[Step, ...]
    params: Structure
    keep_alive: tuple[Any, ...]

    def enqueue(self, stream: Any) -> None:
        """Queue the launch on ``stream`` (a handle, or an object with ``__cuda_stream__``) without waiting for it."""
        handle = stream_handle(stream)
        for step in self.steps:
            self.library.driver.launch(step.entry, step.plan, self.params, handle, step.arguments)

    def with_condition(self, handle: int) -> PreparedLaunch:
        """A copy that also sets the CUDA graph condition ``handle`` (``cudaGraphConditionalHandle``).

        It shares the scratch memory, as a capture must not allocate. Parameters are by value, so captured launches keep theirs.

        Raises:
            TargetError: this GPU's image was compiled without conditions.
        """
        architecture = self.library.architecture
        if architecture.cuda < MIN_CUDA_CONDITIONS:
            raise TargetError(
                f"kernels for {architecture.name} set no CUDA graph condition; read the result from device memory instead"
            )
        params: Any = type(self.params).from_buffer_copy(self.params)
        params.graph_condition = handle
        params.sets_condition = 1
        return replace(self, params=params)
