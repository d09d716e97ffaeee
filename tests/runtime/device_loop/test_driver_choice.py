"""Selection of what drives decoding, and the reason that is shown when it is not the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from plugins.host_driver import HostDriver
from runtime.device_loop.test_decode_loop import EXIT, MODEL, expected, requests
from runtime.device_loop.test_plugin_kernels import SimulatedDriver
from runtime.numpy_backend import tiny_manifest
from runtime.simulated_gpu import SimulatedGpu
from runtime.tiny_device_backend import TinyDeviceBackend
from runtime.tiny_generation import make_row, output
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.loop_kernels import PluginLoopKernels
from tide_runtime import Engine
from tide_runtime.backends.device.element_types import FP32
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.depth.exit import ExitDepth
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.registry import make_policy
from tide_runtime.device_loop import driver_choice
from tide_runtime.device_loop.device_policy import DeviceLoopPolicy
from tide_runtime.errors import TargetError
from tide_runtime.scheduling.step import run


def graphs(no_graphs: str | None = None, no_conditions: str | None = None) -> driver_choice.GraphSupport:
    return driver_choice.GraphSupport(lambda: no_graphs, lambda: no_conditions)


ALL_GRAPHS = graphs()
GPUS = (("sm_70", 70), ("sm_90", 90))
CONDITIONS = b"refers to cudaGraphSetConditional"


class Kernels(PluginLoopKernels):
    """Kernels of a simulated driver that can set graph conditions, as those compiled by CUDA 13."""

    conditions_refused: str | None = None


def simulated_kernels(device: Any) -> Kernels:
    driver = SimulatedDriver()
    driver.gpu = device
    return Kernels(driver.kernels(), device.stream)


def kernels_without_conditions(device: Any) -> Kernels:
    kernels = simulated_kernels(device)
    kernels.conditions_refused = "no graph conditions"
    return kernels


def no_kernels(device: Any) -> Kernels:
    raise TargetError("no kernels for sm_61")


def chosen(
    policy: str = "full",
    exits: tuple[ExitInfo, ...] = (EXIT,),
    no_loop: str | None = None,
    load_kernels: Callable[[Any], Any] = simulated_kernels,
    support: driver_choice.GraphSupport = ALL_GRAPHS,
    **options: Any,
) -> driver_choice.DriverChoice:
    manifest = tiny_manifest(MODEL, [1, 2, 3], exits)
    backend: Any = TinyDeviceBackend(manifest, MODEL, SimulatedGpu())
    backend.no_loop = no_loop
    made = make_policy(policy, manifest, DepthOptions(**options))
    return driver_choice.choose_driver(made, backend, load_kernels, support)


@pytest.mark.parametrize(
    ("policy", "exits"),
    [
        ("full", (EXIT,)),
        ("exact", ()),
        ("exit", (EXIT,)),
        ("exit", (replace(EXIT, head="identity", router="max_probability"),)),
        ("exit", (replace(EXIT, router="mlp+max_probability", mlp_threshold=0.4),)),
        ("exit", (EXIT, replace(EXIT, checkpoint=2))),
    ],
)
def test_the_device_drives_what_it_can(policy: str, exits: tuple[ExitInfo, ...]) -> None:
    made = chosen(policy, exits)
    assert isinstance(made.policy, DeviceLoopPolicy) and made.policy.name == policy
    work = "16 passes with drafts" if policy == "exact" else "16 tokens"
    assert str(made) == f"device-driven, {work} a launch"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"policy": "exact"}, "policy exact drafts with exits"),
        ({"policy": "exact", "draft": "none"}, "does not draft from texts"),
        ({"no_loop": "not captured"}, "not captured"),
        ({"policy": "exit", "exits": (replace(EXIT, head="tail:1"),)}, "an exit's tail attends to"),
        ({"policy": "exit", "max_exit_streak": 3}, "max_exit_streak"),
    ],
)
def test_the_host_drives_the_rest_and_says_why(changes: dict[str, Any], reason: str) -> None:
    """Guards against a silent fallback: the text is the same, only slower."""
    made = chosen(**changes)
    assert not isinstance(made.policy, DeviceLoopPolicy)
    assert reason in str(made) and str(made).startswith("host-driven: ")


@pytest.mark.parametrize("load_kernels", [simulated_kernels, no_kernels])
def test_the_same_tokens_whatever_drives(load_kernels: Callable[[Any], Kernels]) -> None:
    """A loop on the device evaluates exits for every token; a host with cooldowns would generate other tokens in its place."""
    made = chosen("exit", load_kernels=load_kernels).policy
    assert isinstance(made, DeviceLoopPolicy) == (load_kernels is simulated_kernels)
    inner = made.inner if isinstance(made, DeviceLoopPolicy) else made
    assert isinstance(inner, ExitDepth) and inner.evaluates_always


@pytest.mark.parametrize(
    "without",
    [{"support": graphs(no_conditions="no graph conditions")}, {"load_kernels": kernels_without_conditions}],
    ids=["driver", "kernels"],
)
def test_without_conditions_the_host_drives_the_same_loop(without: dict[str, Any]) -> None:
    """Guards against host-driven single steps, which wait for every exit's tokens and scores instead of one flag."""
    made = chosen("exit", **without)
    assert isinstance(made.policy, DeviceLoopPolicy) and str(made) == "host-driven: no graph conditions"
    full = chosen("full", **without)
    assert isinstance(full.policy, DeviceLoopPolicy) and full.reason is None  # a launch of each token needs no conditions


def test_an_old_cuda_core_is_named() -> None:
    """Guards against "cannot be captured" where a release named the builder's methods otherwise, and an upgrade helps."""
    made = chosen("full", support=graphs(no_graphs="cuda-core is old"))
    assert isinstance(made.policy, DeviceLoopPolicy) and str(made) == "host-driven: cuda-core is old"
    assert made.policy.drivers.compile is None


def test_an_old_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a capture that fails in the middle of a request."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="the package cuda-bindings is not installed")
    for version, wanted in ((12060, "for CUDA 12.6, conditional graph nodes need 12.8"), (12080, None)):
        monkeypatch.setattr(driver, "cuDriverGetVersion", lambda v=version: (driver.CUresult.CUDA_SUCCESS, v))
        reason = driver_choice.no_conditions()
        assert reason is None if wanted is None else reason is not None and wanted in reason


def test_a_gpu_without_kernels_is_a_reason() -> None:
    """Guards against a model that cannot run on an old GPU."""
    assert str(chosen(load_kernels=no_kernels)) == "host-driven: no kernels for sm_61"


def test_kernels_for_old_gpus_set_no_conditions() -> None:
    """Guards against conditions in kernels of CUDA 12, whose headers lack them for these GPUs."""
    reasons = {name: PluginLoopKernels(HostDriver(compute=compute).kernels(), 0).conditions_refused for name, compute in GPUS}
    assert reasons == {"sm_70": "kernels for sm_70 set no graph conditions", "sm_90": None}


class WithoutConditions(SimulatedDriver):
    """A GPU whose driver has no cudaGraphSetConditional: images that refer to it cannot be loaded."""

    def load(self, image: bytes, ptx: bool, symbol: str) -> str:
        if image == CONDITIONS:
            raise TargetError(f"GPU 0 cannot load {symbol}: cuFuncLoad failed: CUDA_ERROR_NOT_FOUND")
        return super().load(image, ptx, symbol)


@pytest.mark.parametrize("policy", ["full", "exit"])
def test_a_driver_without_the_function_that_sets_conditions_still_runs_the_kernels(policy: str) -> None:
    """Guards against three kernels that cannot be loaded at all, whatever drives, and against a WHILE that never ends."""

    def built(kernel: Any, architecture: Any, conditions: bool = True) -> Any:
        refers = conditions and kernel.name in ("loop_turn", "exit_candidates", "exit_gate")
        return SimpleNamespace(image=SimpleNamespace(content=CONDITIONS if refers else b""))

    def load_kernels(device: Any) -> PluginLoopKernels:
        driver, builder = WithoutConditions(), cast(Any, SimpleNamespace(build=built))
        driver.gpu = device
        return PluginLoopKernels(KernelLibrary(driver, builder), device.stream)

    exits = (EXIT,) if policy == "exit" else ()
    manifest = tiny_manifest(MODEL, [1, 3], exits)
    backend: Any = TinyDeviceBackend(manifest, MODEL, SimulatedGpu(), logits=FP32)
    made = driver_choice.choose_driver(make_policy(policy, manifest, DepthOptions()), backend, load_kernels, ALL_GRAPHS)
    wanted, context = requests(eos=(4,)), backend.context(1)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(2):  # the host drives the first launches
            rows = [make_row(request, manifest) for request in wanted]
            for _ in run(made.policy, context, rows):
                pass
            assert [output(row) for row in rows] == expected(wanted, exits)
    assert backend.device.graph_launches
    assert "CUDA_ERROR_NOT_FOUND; loaded without graph conditions" in str(made)
    assert [str(warning.message).endswith("driven from the host") for warning in heard] == ([True] if exits else [])


def test_kernels_that_cannot_be_built_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a request that fails because the compiler, needed by its first loop, is missing."""

    def without_compiler(device: Any) -> Kernels:
        driver = SimulatedDriver()
        driver.gpu = device
        library = driver.kernels()
        monkeypatch.setattr(library, "entry", lambda *what: no_kernels(device))
        return Kernels(library, device.stream)

    manifest = tiny_manifest(MODEL, [1, 3])
    backend: Any = TinyDeviceBackend(manifest, MODEL, SimulatedGpu())
    made = driver_choice.choose_driver(make_policy("full", manifest, DepthOptions()), backend, without_compiler, ALL_GRAPHS)
    wanted = requests(eos=(4,))
    rows = [make_row(request, manifest) for request in wanted]
    with pytest.warns(RuntimeWarning, match="no kernels for sm_61; decoding is driven from the host") as warned:
        for _ in run(made.policy, backend.context(3), rows):
            pass
    assert [output(row) for row in rows] == expected(wanted, ())
    assert str(made) == "host-driven: no kernels for sm_61" and len(warned) == 1


def test_an_engine_says_what_drives_it(load: Callable[..., Engine]) -> None:
    with load() as engine:
        assert str(engine.drive) == "host-driven: the target runs on the processor"
        assert engine.drive.policy is engine.policy
