"""Costs and policies are measured on the target in use: here that of a GPU, over host memory."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime.conftest import bundle, exits_bundle, hf_model_directory, load
from runtime.host_device import HostDevice
from tide_calibrate.costs import host_overhead
from tide_calibrate.costs.measure import measure_costs
from tide_calibrate.rehearsal import measure_policies
from tide_runtime import ThreadOptions
from tide_runtime.backends import BACKENDS
from tide_runtime.backends.onnxruntime.cuda import OnnxRuntimeCudaBackend
from tide_runtime.bundle import Bundle

__all__ = ["bundle", "exits_bundle", "hf_model_directory", "load"]


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HostDevice]]:
    """The devices of the target ``cuda`` that have been loaded."""
    devices = list[HostDevice]()

    def on_host(opened: Bundle, target: str, threads: ThreadOptions, *_: object) -> OnnxRuntimeCudaBackend:
        devices.append(HostDevice())
        return OnnxRuntimeCudaBackend.load(opened, target, threads, devices[-1], ("CPUExecutionProvider", {}))

    monkeypatch.setitem(BACKENDS, "onnxruntime-cuda", on_host)
    yield devices


def test_costs_and_policies_are_those_of_the_target(
    bundle: Path, exits_bundle: Path, waits: list[HostDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a calibration that needs the target cpu, and speeds of a processor that are promised for a GPU."""
    monkeypatch.setattr(host_overhead, "STEPS", 4)
    monkeypatch.setattr(host_overhead, "REPEATS", 1)
    table = measure_costs(bundle, "cuda", {1: (1, 2)}, ThreadOptions(1), rounds=3, budget_s=0.0)
    assert table.target == "cuda"
    assert [(step.rows, step.seq) for step in table.steps] == [(1, 1), (1, 2)]
    assert len(waits) == 1 and waits[0].waits > 3 * 2 * 4  # rounds, sizes, graphs
    found = measure_policies(exits_bundle, [[3, 40, 99, 7]], 4, ["exact"], 0.0, ThreadOptions(1), "cuda")
    assert len(waits) == 2 and set(found) == {"exact"}
