"""Who drives decoding, and the reason that people read when it is not the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from runtime.numpy_backend import tiny_manifest
from runtime.simulated_gpu import SimulatedGpu
from runtime.test_decode_loop import EXIT, MODEL
from runtime.test_plugin_kernels import SimulatedDriver
from runtime.tiny_device_backend import TinyDeviceBackend
from tide_runtime import Engine
from tide_runtime.calibration import ExitInfo
from tide_runtime.cuda import drive
from tide_runtime.cuda.plugin_kernels import PluginLoopKernels
from tide_runtime.errors import TargetError
from tide_runtime.policies import make_policy
from tide_runtime.policies.driven import DrivenDepth
from tide_runtime.policies.exit import ExitDepth
from tide_runtime.policies.options import DepthOptions


@pytest.fixture
def can(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver and kernels that can do it."""

    def kernels(device: Any) -> PluginLoopKernels:
        driver = SimulatedDriver()
        driver.gpu = device
        return PluginLoopKernels(driver.kernels(), device.stream)

    monkeypatch.setattr(drive, "_why_not_driver", lambda: None)
    monkeypatch.setattr(drive, "_kernels", kernels)


def chosen(policy: str = "full", exits: tuple[ExitInfo, ...] = (EXIT,), pads: bool = True, **options: Any) -> drive.Drive:
    manifest = tiny_manifest(MODEL, [1, 2, 3], exits)
    backend: Any = TinyDeviceBackend(manifest, MODEL, SimulatedGpu())
    backend.pads_rows = pads
    return drive.choose_drive(make_policy(policy, manifest, 8, DepthOptions(**options)), backend)


@pytest.mark.usefixtures("can")
@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        ("full", {}),
        ("exit", {}),
        ("exit", {"head": "identity", "router": "max_probability"}),
        ("exit", {"router": "mlp+max_probability", "mlp_threshold": 0.4}),
    ],
)
def test_the_device_drives_what_it_can(policy: str, changes: dict[str, Any]) -> None:
    made = chosen(policy, (replace(EXIT, **changes),))
    assert isinstance(made.policy, DrivenDepth) and made.policy.name == policy
    assert str(made) == "device-driven, 16 tokens a launch"


@pytest.mark.usefixtures("can")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"policy": "exact"}, "policy exact decides on the host"),
        ({"pads": False}, "attention in fp32"),
        ({"policy": "exit", "pads": False}, "several tokens of one row only"),
        ({"policy": "exit", "exits": (EXIT, replace(EXIT, checkpoint=2))}, "there are 2 exits"),
        ({"policy": "exit", "exits": (replace(EXIT, head="tail:1"),)}, "the exit's tail attends to"),
        ({"policy": "exit", "max_exit_streak": 3}, "max_exit_streak"),
    ],
)
def test_the_host_drives_the_rest_and_says_why(changes: dict[str, Any], reason: str) -> None:
    """Whoever waits for a GPU that a host holds up finds nothing in the text that comes out."""
    made = chosen(**changes)
    assert not isinstance(made.policy, DrivenDepth)
    assert reason in str(made) and str(made).startswith("host-driven: ")


@pytest.mark.parametrize("reason", [None, "the driver is for CUDA 12.2"])
def test_the_same_tokens_whoever_drives(reason: str | None, monkeypatch: pytest.MonkeyPatch, can: None) -> None:
    """A loop on the device asks exits about every token; a host that let them rest would say other tokens in its place."""
    monkeypatch.setattr(drive, "_why_not_driver", lambda: reason)
    made = chosen("exit").policy
    inner = made.inner if isinstance(made, DrivenDepth) else made
    assert isinstance(inner, ExitDepth) and inner.asks_always


def test_an_old_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conditional nodes would fail when the graph is made, in the middle of a request."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="the package cuda-bindings is not installed")
    for version, wanted in ((12020, "for CUDA 12.2, conditional graph nodes need 12.4"), (12040, None)):
        monkeypatch.setattr(driver, "cuDriverGetVersion", lambda v=version: (driver.CUresult.CUDA_SUCCESS, v))
        reason = drive._why_not_driver()
        assert reason is None if wanted is None else reason is not None and wanted in reason


def test_kernels_that_cannot_be_built_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing compiler must not keep a model from running."""

    def refuse(device: Any) -> None:
        raise TargetError("kernels for sm_70 set no graph conditions")

    monkeypatch.setattr(drive, "_why_not_driver", lambda: None)
    monkeypatch.setattr(drive, "_kernels", refuse)
    assert str(chosen()) == "host-driven: kernels for sm_70 set no graph conditions"


@pytest.mark.usefixtures("can")
def test_a_loop_that_cannot_be_captured_is_a_reason() -> None:
    """It shows at the first launches only: until then the device was to drive."""
    made = chosen()
    assert isinstance(made.policy, DrivenDepth)

    def refuse(program: Any) -> Callable[[], None]:
        raise TargetError("the graph cannot be instantiated")

    made.policy.drivers.compile = refuse
    with pytest.warns(RuntimeWarning, match="driven from the host"):
        made.policy.drivers.compiled([])
    assert str(made) == "host-driven: the graph cannot be instantiated"


def test_engines_say_who_drives(load: Callable[..., Engine]) -> None:
    with load() as engine:
        assert str(engine.drive) == "host-driven: the target runs on the processor"
        assert engine.drive.policy is engine.policy
