"""The CUDA kernels of a decode loop, compiled for this machine, in loops on the simulated GPU."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from typing import Any

import pytest
from plugins.host_driver import HostDriver
from runtime.device_loop.test_decode_loop import EXITS, TURNS, Driven, expected, requests
from runtime.simulated_gpu import SimulatedGpu
from tide_plugins.loop_kernels import PluginLoopKernels
from tide_plugins.plans import LaunchPlan
from tide_runtime.backends.device.element_types import FP32
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.device_loop.device_policy import DeviceLoopPolicy


class SimulatedDriver(HostDriver):
    """Launches on the simulated GPU's streams; parameters are copied when a launch is queued, as on a GPU."""

    gpu: SimulatedGpu

    def launch(self, entry: str, plan: LaunchPlan, params: Structure, stream: int, arguments: Sequence[str] = ()) -> None:
        taken = type(params).from_buffer_copy(params)

        def run() -> None:
            HostDriver.launch(self, entry, plan, taken, stream, arguments)
            handle, value, calls = self.graph_condition()
            assert calls == getattr(taken, "sets_condition", 0)
            if calls:
                self.gpu.set_condition(handle, value)

        self.gpu.submit(stream, run)


def with_real_kernels(driven: Driven, order: int) -> Driven:
    driver = SimulatedDriver(order)
    driver.gpu = driven.gpu
    kernels: Any = PluginLoopKernels(driver.kernels(), driven.gpu.stream)
    policy = driven.policy
    driven.policy = DeviceLoopPolicy(policy.plan, kernels, TURNS, driven.drivers, policy._window)
    return driven


@pytest.mark.parametrize("exits", [EXITS["none"], EXITS["both"], EXITS["three"]], ids=["none", "both", "three"])
@pytest.mark.parametrize(("compile", "order"), [(True, 5), (False, 1)])
def test_loops_of_real_kernels_generate_the_same_tokens(exits: tuple[ExitInfo, ...], compile: bool, order: int) -> None:
    """Guards against launches that a driver takes otherwise than the references of the other tests take their tensors."""
    for wanted in (requests(eos=(4,)), requests(budgets=(99, 5, 99, 99, 9))):
        driven = with_real_kernels(Driven(exits, compile, logits=FP32), order)
        assert driven.tokens(wanted, 5) == expected(wanted, exits)
    assert bool(driven.gpu.graph_launches) == compile
