"""Which device a comparison runs on, which targets of the bundle run there, and what is said where none does."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tide_bench import counters, device_choice
from tide_bench.arms import POLICIES, on_target
from tide_bench.arms.base import ArmDevice
from tide_bench.config import BenchConfig, default_rivals
from tide_bench.device_choice import BenchDevice, choose_device
from tide_runtime.bundle.manifest import Manifest, read_manifest
from tide_runtime.errors import ParamsError, TargetError
from tide_runtime.targets import target_choice
from tide_runtime.targets.gpu_probe import PresentGpu


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that the driver names, whose packages are all here."""
    for module in (device_choice, target_choice):
        monkeypatch.setattr(module, "present_gpu", lambda ordinal=0: PresentGpu("H100", 90))
    monkeypatch.setattr(target_choice, "_missing_package", lambda target: None)
    monkeypatch.setattr(target_choice, "onnxruntime_compute", lambda: (90,))


def _manifest(bundle: Path, *targets: str) -> Manifest:
    """The bundle's manifest, with these targets alone."""
    manifest = read_manifest(bundle)
    return replace(manifest, targets={name: manifest.targets[name] for name in targets}, dtype="fp16")


def test_the_processor_is_the_default_without_a_gpu(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tide-bench` would end with an error on every laptop."""
    for module in (device_choice, target_choice):
        monkeypatch.setattr(module, "present_gpu", lambda ordinal=0: None)
    chosen = choose_device(read_manifest(bundle))
    assert (chosen.name, chosen.kind, chosen.targets[0], chosen.gpu) == ("cpu", "cpu", "cpu", "")
    assert chosen.of_arms == ArmDevice("cpu", "fp32", "cpu")


def test_a_gpu_is_the_default_and_takes_its_own_targets(bundle: Path, h100: None) -> None:
    """TIDE on the GPU would be compared with torch on the processor, or the other way round."""
    chosen = choose_device(_manifest(bundle, "cpu", "cuda"))
    assert chosen == BenchDevice("cuda", ("cuda",), "fp16", "H100")
    on_cpu = choose_device(_manifest(bundle, "cpu", "cuda"), "cpu")
    assert on_cpu == BenchDevice("cpu", ("cpu",))


def test_a_bundle_without_a_target_for_the_gpu_says_what_it_has_and_how_to_add_one(bundle: Path, h100: None) -> None:
    """The comparison would run on the processor beside an idle GPU, or end with a traceback."""
    with pytest.raises(TargetError, match=r"It has: cpu \(runs on the processor\).*tide-export .* --target cuda.*--device cpu"):
        choose_device(_manifest(bundle, "cpu"))
    with pytest.raises(TargetError, match="--target has torch; the bundle has: cpu, cuda; add it: tide-export"):
        choose_device(_manifest(bundle, "cpu", "cuda"), targets=["torch"])
    with pytest.raises(TargetError, match="target cpu does not run on cuda"):
        choose_device(_manifest(bundle, "cpu", "cuda"), targets=["cpu"])


def test_the_command_refuses_a_gpu_that_is_not_here(bundle: Path) -> None:
    """A script would take a table of the processor for one of the GPU."""
    if target_choice.present_gpu() is not None:
        pytest.skip("needs a machine without a GPU")
    command = [sys.executable, "-m", "tide_bench.cli", str(bundle), "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "It has: cpu" in done.stderr and "--target cuda" in done.stderr


def test_arms_of_the_other_device_are_refused_by_name() -> None:
    """A library of the processor would be ranked among those of a GPU."""
    assert "cuda-graph" in default_rivals("cuda") and "cuda-graph" not in default_rivals("cpu")
    assert "genai" not in default_rivals("cuda")
    for device, name in (("cuda", "llamacpp"), ("cpu", "cuda-graph")):
        with pytest.raises(ParamsError, match=f"on {device}, --vs has {name}"):
            BenchConfig(device=device, rivals=(name,))


def test_further_targets_are_arms_of_their_own() -> None:
    """Two targets in one process would share its memory figure, and the second one's row replace the first one's."""
    arm = on_target(POLICIES["exact"], "torch")
    assert (arm.name, arm.title, arm.process, arm.target) == ("torch-exact", "TIDE torch exact", "tide-torch", "torch")


def test_gpu_memory_is_that_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other arms' weights, which stay on the GPU while one is timed, would count as this one's."""

    def processes(handle: int) -> list[SimpleNamespace]:
        own = {"pid": counters.os.getpid(), "usedGpuMemory": 7 + handle}
        return [SimpleNamespace(pid=1, usedGpuMemory=100), SimpleNamespace(**own)]

    library = SimpleNamespace(NVMLError=RuntimeError, nvmlDeviceGetComputeRunningProcesses=processes)
    monkeypatch.setattr(counters, "_gpus", lambda: (library, (0, 1)))
    assert counters.gpu_bytes() == 15
    monkeypatch.setattr(counters, "_gpus", lambda: (None, ()))
    assert counters.gpu_bytes() is None
