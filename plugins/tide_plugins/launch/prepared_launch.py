"""A launch whose arguments were checked and laid out once, and which costs one driver call per kernel from then on."""

from __future__ import annotations

from ctypes import Structure
from dataclasses import dataclass
from typing import Any

from tide_plugins.launch.driver import Driver
from tide_plugins.launch.stream_handle import stream_handle
from tide_plugins.plans import LaunchPlan


@dataclass(frozen=True)
class Step:
    """One kernel of a prepared launch."""

    entry: Any
    plan: LaunchPlan


@dataclass(frozen=True)
class PreparedLaunch:
    """Kernels that run one after the other with the same parameters. Keeps the tensors and its scratch memory alive.

    The scratch memory serves one launch at a time: enqueue again on the same stream, or after the last one is done. Enqueueing
    allocates nothing and waits for nothing, so that it may be captured in a CUDA graph.
    """

    driver: Driver
    steps: tuple[Step, ...]
    params: Structure
    keep_alive: tuple[Any, ...]

    def enqueue(self, stream: Any) -> None:
        """Put the launch on ``stream`` (a handle, or an object with ``__cuda_stream__``) and return at once."""
        handle = stream_handle(stream)
        for step in self.steps:
            self.driver.launch(step.entry, step.plan, self.params, handle)
