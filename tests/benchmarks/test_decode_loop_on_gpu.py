"""The check of decode loops on a GPU, on a machine without one: its output, what it finds, and that its bundle qualifies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from runtime.device_loop.test_decode_loop import EXITS, MODEL, PROMPTS
from runtime.numpy_backend import tiny_manifest
from runtime.numpy_loop_kernels import NumpyLoopKernels
from runtime.simulated_gpu import SimulatedGpu
from runtime.tiny_device_backend import TinyDeviceBackend
from runtime.tiny_generation import Request, make_row
from tide_runtime import GenerationParams
from tide_runtime.backends.device.device_step import DeviceContext
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.registry import make_policy
from tide_runtime.device_loop.graph_driver import GraphDriver
from tide_runtime.device_loop.host_driver import HostDriver
from tide_runtime.device_loop.policy import DrivenDepth, Drivers
from tide_runtime.device_loop.select import Drive
from tide_runtime.errors import TargetError
from tide_runtime.sequence import TokenSequence

from benchmarks.gpu import decode_loop
from benchmarks.gpu.decode_loop import Prompts
from benchmarks.gpu.kit_bundles import COSTS

ALL = [list(prompt) for prompt in PROMPTS]


class SimulatedEngine:
    """What the check needs of an `Engine`, with a transformer in NumPy on the simulated GPU."""

    def __init__(self, policy: str) -> None:
        self.gpu, manifest = SimulatedGpu(), tiny_manifest(MODEL, [1, 3], EXITS["two"])
        assert manifest.calibration is not None
        self.manifest: Manifest = replace(manifest, calibration=replace(manifest.calibration, costs=COSTS))
        inner: Any = make_policy(policy, self.manifest, DepthOptions())
        self.drivers = Drivers(HostDriver(self.gpu).compile, GraphDriver(self.gpu).compile)
        made = DrivenDepth(inner.device_plan(), NumpyLoopKernels(self.gpu), 5, self.drivers, 4)
        self.drive, self.policy, self.depth = Drive(made, loop=made), inner, len(MODEL.strengths)
        self.backend = TinyDeviceBackend(self.manifest, MODEL, self.gpu)
        self.admission = SimpleNamespace(sequences=self._sequences)

    def _sequences(self, prompts: list[list[int]], params: GenerationParams) -> list[TokenSequence]:
        return [make_row(Request(tuple(prompt), params, seat), self.manifest) for seat, prompt in enumerate(prompts)]


def compared(engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch, prompts: Prompts = ALL) -> dict[str, Any]:
    monkeypatch.setattr(decode_loop, "_NEW", 25)
    given: Any = engine
    return decode_loop.compare(given, prompts)


@pytest.mark.parametrize(
    ("policy", "prompts"), [("full", ALL), ("exit", [ALL[2]]), ("exit", ALL)], ids=["full-batch", "exit", "exit-batch"]
)
def test_a_device_with_the_same_text_has_no_complaint(policy: str, prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that always fails, or whose host pauses its exits while the device evaluates them, is soon ignored."""
    engine = SimulatedEngine(policy)
    row = compared(engine, monkeypatch, prompts)
    assert engine.gpu.graph_launches > 0
    assert row["reason"] is None and row["different"] == 0 and row["texts"] == 4 * len(prompts)
    assert decode_loop.complaint(policy, row) is None


class MixesUpTwoTokens(DrivenDepth):
    """As a broken kernel would."""

    def _take(self, context: DeviceContext, sequence: TokenSequence, values: Iterable[int]) -> list[int]:
        return [{4: 3}.get(token, token) for token in super()._take(context, sequence, values)]


@pytest.mark.parametrize(("policy", "prompts"), [("full", ALL), ("exit", [ALL[2]])])
def test_a_device_with_another_text_is_found(policy: str, prompts: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that cannot fail proves nothing."""
    engine = SimulatedEngine(policy)
    engine.drive.policy.__class__ = MixesUpTwoTokens
    row = compared(engine, monkeypatch, prompts)
    assert row["reason"] is None and row["different"] > 0
    assert "texts are not the host's" in str(decode_loop.complaint(policy, row))


def test_a_graph_that_was_not_captured_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host would drive, generate the same, and the check would pass."""
    engine = SimulatedEngine("full")

    def refuse(program: Sequence[object]) -> Any:
        raise TargetError("the decode step cannot be captured in a CUDA graph: no")

    engine.drivers.compile = refuse
    row = compared(engine, monkeypatch)
    complaint = decode_loop.complaint("full", row)
    assert complaint is not None and complaint.startswith("the host drove: the decode step cannot be captured")


def test_a_host_that_drives_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the device would be tried, and the target count as executed."""
    engine = SimulatedEngine("full")
    engine.drive = Drive(engine.policy, "the driver is for CUDA 12.2")
    row = compared(engine, monkeypatch)
    assert decode_loop.complaint("full", row) == "the host drove: the driver is for CUDA 12.2"


def test_the_hosts_waits_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that waits for the device at every token is what device-driven loops are there to avoid."""
    engine = SimulatedEngine("full")
    row = compared(engine, monkeypatch, [ALL[0]])
    assert 0 < row["host_waits_per_token"] < 0.5  # five turns a launch, and a wait for the prompt
    wait = engine.gpu.synchronize
    with decode_loop.counted_waits(engine.gpu) as waits:
        engine.gpu.synchronize()
    assert waits == [1] and engine.gpu.synchronize == wait


def test_exits_that_were_not_tried_are_found() -> None:
    """A router with one decision leaves the other ways untried."""
    row = {"reason": None, "different": 0, "texts": 4, "left_early": 1.0, "least_taken": 0.0}
    assert "left early" in str(decode_loop.complaint("exit", row))
