"""Who drives decoding, and the reason that people read when it is not the GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from runtime.numpy_backend import tiny_manifest
from runtime.simulated_gpu import SimulatedGpu
from runtime.test_decode_loop import EXIT, MODEL, expected, requests
from runtime.test_plugin_kernels import SimulatedDriver
from runtime.tiny_device_backend import TinyDeviceBackend
from runtime.tiny_generation import make_row, output
from tide_plugins.architectures import ARCHITECTURES
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_runtime import Engine
from tide_runtime.calibration import ExitInfo
from tide_runtime.cuda import drive
from tide_runtime.errors import TargetError
from tide_runtime.policies import make_policy
from tide_runtime.policies.driven import DrivenDepth
from tide_runtime.policies.exit import ExitDepth
from tide_runtime.policies.options import DepthOptions
from tide_runtime.scheduler import run


@pytest.fixture
def can(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver and kernels that can do it."""

    def library(device: Any) -> KernelLibrary:
        driver = SimulatedDriver()
        driver.gpu = device
        return driver.kernels()

    monkeypatch.setattr(drive, "_why_not_driver", lambda: None)
    monkeypatch.setattr(drive, "_why_not_kernels", lambda library: None)
    monkeypatch.setattr(drive, "_library", library)


def chosen(policy: str = "full", exits: tuple[ExitInfo, ...] = (EXIT,), pads: bool = True, **options: Any) -> drive.Drive:
    manifest = tiny_manifest(MODEL, [1, 2, 3], exits)
    backend: Any = TinyDeviceBackend(manifest, MODEL, SimulatedGpu())
    backend.pads_rows = pads
    return drive.choose_drive(make_policy(policy, manifest, 8, DepthOptions(**options)), backend)


@pytest.mark.usefixtures("can")
@pytest.mark.parametrize(
    ("policy", "exits"),
    [
        ("full", (EXIT,)),
        ("exit", (EXIT,)),
        ("exit", (replace(EXIT, head="identity", router="max_probability"),)),
        ("exit", (replace(EXIT, router="mlp+max_probability", mlp_threshold=0.4),)),
        ("exit", (EXIT, replace(EXIT, checkpoint=2))),
    ],
)
def test_the_device_drives_what_it_can(policy: str, exits: tuple[ExitInfo, ...]) -> None:
    made = chosen(policy, exits)
    assert isinstance(made.policy, DrivenDepth) and made.policy.name == policy
    assert str(made) == "device-driven, 16 tokens a launch"


@pytest.mark.usefixtures("can")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"policy": "exact"}, "policy exact decides on the host"),
        ({"pads": False}, "attention in fp32"),
        ({"policy": "exit", "pads": False}, "several tokens of one row only"),
        ({"policy": "exit", "exits": (replace(EXIT, head="tail:1"),)}, "an exit's tail attends to"),
        ({"policy": "exit", "max_exit_streak": 3}, "max_exit_streak"),
    ],
)
def test_the_host_drives_the_rest_and_says_why(changes: dict[str, Any], reason: str) -> None:
    """Whoever waits for a GPU that a host holds up finds nothing in the text that comes out."""
    made = chosen(**changes)
    assert not isinstance(made.policy, DrivenDepth)
    assert reason in str(made) and str(made).startswith("host-driven: ")


def no_kernels(device: Any) -> KernelLibrary:
    raise TargetError("no kernels for sm_61")


@pytest.mark.parametrize("library", [None, no_kernels])
def test_the_same_tokens_whoever_drives(library: Any, monkeypatch: pytest.MonkeyPatch, can: None) -> None:
    """A loop on the device asks exits about every token; a host that let them rest would say other tokens in its place."""
    if library is not None:
        monkeypatch.setattr(drive, "_library", library)
    made = chosen("exit").policy
    assert isinstance(made, DrivenDepth) == (library is None)
    inner = made.inner if isinstance(made, DrivenDepth) else made
    assert isinstance(inner, ExitDepth) and inner.asks_always


@pytest.mark.parametrize("which", ["_why_not_driver", "_why_not_kernels"])
def test_without_conditions_the_host_drives_the_same_loop(which: str, monkeypatch: pytest.MonkeyPatch, can: None) -> None:
    """It waits for a flag at each condition; the policy's own steps would wait for every exit's tokens and scores."""
    monkeypatch.setattr(drive, which, lambda *given: "no graph conditions")
    made = chosen("exit")
    assert isinstance(made.policy, DrivenDepth) and str(made) == "host-driven: no graph conditions"
    assert made.policy._drivers.compile is None


def test_an_old_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conditional nodes would fail when the graph is made, in the middle of a request."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="the package cuda-bindings is not installed")
    for version, wanted in ((12020, "for CUDA 12.2, conditional graph nodes need 12.4"), (12040, None)):
        monkeypatch.setattr(driver, "cuDriverGetVersion", lambda v=version: (driver.CUresult.CUDA_SUCCESS, v))
        reason = drive._why_not_driver()
        assert reason is None if wanted is None else reason is not None and wanted in reason


def test_a_gpu_without_kernels_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old GPU must not keep a model from running."""
    monkeypatch.setattr(drive, "_library", no_kernels)
    assert str(chosen()) == "host-driven: no kernels for sm_61"


def test_kernels_for_old_gpus_set_no_conditions() -> None:
    """CUDA 12 compiles them, whose headers have no graph conditions for them."""
    reasons = {a.name: drive._why_not_kernels(SimpleNamespace(architecture=a)) for a in ARCHITECTURES}  # type: ignore[arg-type]
    assert reasons["sm_70"] == "kernels for sm_70 set no graph conditions" and reasons["sm_90"] is None


def test_kernels_that_cannot_be_built_are_a_reason(monkeypatch: pytest.MonkeyPatch, can: None) -> None:
    """A missing compiler shows when a loop first asks for a kernel, in the middle of a request that can go on without."""
    library = drive._library

    def without_compiler(device: Any) -> KernelLibrary:
        made = library(device)
        monkeypatch.setattr(made, "entry", lambda *what: no_kernels(device))
        return made

    monkeypatch.setattr(drive, "_library", without_compiler)
    manifest = tiny_manifest(MODEL, [1, 3])
    backend: Any = TinyDeviceBackend(manifest, MODEL, SimulatedGpu())
    made = drive.choose_drive(make_policy("full", manifest, 8, DepthOptions()), backend)
    wanted = requests(eos=(4,))
    rows = [make_row(request, manifest) for request in wanted]
    with pytest.warns(RuntimeWarning, match="no kernels for sm_61; decoding is driven from the host") as warned:
        for _ in run(made.policy, backend.slots(3), rows):
            pass
    assert [output(row) for row in rows] == expected(wanted, ())
    assert str(made) == "host-driven: no kernels for sm_61" and len(warned) == 1


@pytest.mark.usefixtures("can")
def test_a_loop_that_cannot_be_captured_is_a_reason() -> None:
    """It shows at the first launches only: until then the device was to drive."""
    made = chosen()
    assert isinstance(made.policy, DrivenDepth)

    def refuse(program: Any) -> Callable[[], None]:
        raise TargetError("the graph cannot be instantiated")

    made.policy._drivers.compile = refuse
    with pytest.warns(RuntimeWarning, match="driven from the host"):
        made.policy._drivers.compiled([])
    assert str(made) == "host-driven: the graph cannot be instantiated"


def test_engines_say_who_drives(load: Callable[..., Engine]) -> None:
    with load() as engine:
        assert str(engine.drive) == "host-driven: the target runs on the processor"
        assert engine.drive.policy is engine.policy
