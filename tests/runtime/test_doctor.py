"""``tide-doctor``: what is here, and what each target lacks, with nothing but the base installation and with GPUs."""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import onnxruntime
import pytest
from tide_runtime.backends.device import cuda_device
from tide_runtime.backends.onnxruntime import distribution
from tide_runtime.cli import doctor as command
from tide_runtime.cli.doctor import checkup, main
from tide_runtime.targets import checkup as module
from tide_runtime.targets import target_choice
from tide_runtime.targets.checkup import every_target, lacking
from tide_runtime.targets.gpu_probe import PresentGpu

T4, L40, H100, B200 = (
    PresentGpu(name, compute)
    for name, compute in (("Tesla T4", 75), ("NVIDIA L40", 89), ("NVIDIA H100", 90), ("NVIDIA B200", 100))
)
CUDA_13, CUDA_12 = 13000, 12040


def on(monkeypatch: pytest.MonkeyPatch, *gpus: PresentGpu, driver: int = CUDA_13) -> None:
    monkeypatch.setattr(module, "present_gpu", lambda ordinal=0: gpus[ordinal] if ordinal < len(gpus) else None)
    for used in (module, command):
        monkeypatch.setattr(used, "driver_cuda", lambda: driver if gpus else None)


def test_the_base_installation_is_enough() -> None:
    """Guards against a doctor that needs what it looks for: here it runs without GPU, as a process of its own."""
    modules = "'torch', 'onnx', 'tensorrt_rtx', 'tensorrt', 'cuda.core', 'cuda.bindings', 'transformers', 'tide_export'"
    hidden = f"import sys; sys.modules.update(dict.fromkeys([{modules}]))"
    code = f"{hidden}\nfrom tide_runtime.cli.doctor import main\nsys.argv[1:] = ['--json']\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["targets"]["cpu"] == {"runs": True, "lacks": []}
    assert any("TensorRT-RTX" in reason for reason in facts["targets"]["rtx-sm_89"]["lacks"])


def test_targets_are_those_of_the_exporter() -> None:
    """Guards against names that `tide-export --target` does not take."""
    targets = pytest.importorskip("tide_export.targets", reason="the exporter is not installed").TARGETS
    own = every_target()
    assert list(own) == list(targets)
    for name, target in targets.items():
        here = set(target.machine.compute) & set(own[name].compute)  # onnxruntime-gpu's wheels depend on the processor
        assert (own[name].backend, set(own[name].compute)) == (target.backend, here)


@pytest.mark.parametrize("gpu", [T4, L40, H100])
def test_a_gpu_runs_its_own_targets(monkeypatch: pytest.MonkeyPatch, gpu: PresentGpu) -> None:
    on(monkeypatch, gpu)
    monkeypatch.setattr(target_choice, "_missing_package", lambda target: None)
    targets = checkup()["targets"]
    engines = [name for name, target in targets.items() if name.startswith(("rtx-", "trt-")) and target["runs"]]
    own = [] if gpu is H100 else [f"rtx-sm_{gpu.compute}", *(["rtx-ampere+"] if gpu is L40 else [])]
    assert engines == [*own, f"trt-sm_{gpu.compute}"]
    assert targets["cuda"]["runs"] and targets["cpu"]["runs"]
    assert targets["trt-sm_70"]["lacks"] == [f"a GPU of the kind V100; here: {gpu.name} (sm_{gpu.compute})"]


def test_everything_that_a_target_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a user who installs one package after the other and learns of the next each time."""
    on(monkeypatch, B200)
    monkeypatch.setattr(target_choice, "missing_cuda_core", lambda: None)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
    gpu, package = checkup()["targets"]["cuda"]["lacks"]
    assert "here: NVIDIA B200 (sm_100)" in gpu and "RTX 40" in gpu
    assert package.endswith("pip install --force-reinstall --no-deps onnxruntime-gpu")


def test_an_old_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against "CUDA driver version is insufficient" from within a library, at the first request."""
    monkeypatch.setattr(target_choice, "_missing_package", lambda target: None)
    [reason] = lacking(every_target()["cuda"], [L40], CUDA_12)
    assert "the driver is for 12.4; install an NVIDIA driver of release 580" in reason
    assert lacking(every_target()["trt-sm_70"], [PresentGpu("V100", 70)], CUDA_12) == []


def test_an_onnx_runtime_under_the_other_ones_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a GPU that stays idle after `pip install 'tide-llm[bench]'`, which may bring the CPU package again."""
    on(monkeypatch, L40)
    both = {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"}
    monkeypatch.setattr(distribution, "packages_distributions", lambda: {"onnxruntime": list(both)})
    monkeypatch.setattr(distribution, "version", both.__getitem__)
    monkeypatch.setattr(onnxruntime, "__version__", "1.32.0")
    found = checkup()
    assert any("lie over those of onnxruntime-gpu" in warning for warning in found["warnings"])
    monkeypatch.setattr(onnxruntime, "__version__", "1.31.1")
    found = checkup()
    assert not any("lie over" in warning for warning in found["warnings"])
    assert found["imported_onnxruntime"] == "onnxruntime-gpu 1.31.1"
    assert found["targets"]["cpu"]["lacks"] == ["needs ONNX Runtime 1.32 or newer, here is onnxruntime-gpu 1.31.1"]


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        (None, "the package cuda-core is not installed; pip install"),
        ("0.3.2", "cuda-core 0.3.2 is installed, 1.2 or newer is needed; pip install"),
        ("1.1.0", "cuda-core 1.1.0 is installed, 1.2 or newer is needed"),
        ("1.2rc1", None),
        ("1.2.0", None),
        ("2.0.0", None),
    ],
)
def test_an_old_cuda_core_is_named(monkeypatch: pytest.MonkeyPatch, release: str | None, reason: str | None) -> None:
    """Guards against an ImportError or AttributeError of another release's names at the first request."""

    def version(name: str) -> str:
        if release is None:
            raise PackageNotFoundError(name)
        return release

    monkeypatch.setattr(cuda_device, "version", version)
    found = cuda_device.missing_cuda_core()
    assert found is None if reason is None else str(found).startswith(reason)


def test_the_exit_code_says_whether_anything_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tide-doctor"])
    for lacks, code in (([], 0), (["everything"], 1)):
        monkeypatch.setattr(command, "lacking", lambda *_, lacks=lacks: lacks)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
    assert "everything" in capsys.readouterr().out
