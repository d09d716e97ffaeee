"""The target whose steps a calibration times, or a refusal before it trains."""

import onnxruntime
import pytest
from tide_calibrate.measured_target import measured_target
from tide_runtime.errors import TargetError
from tide_runtime.targets import target_choice
from tide_runtime.targets.gpu_probe import PresentGpu

from tide_export.targets import choice

L40 = PresentGpu("NVIDIA L40", 89)


@pytest.fixture
def onnxruntime_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of target ``cuda``: the newest onnxruntime-gpu is older than what bundles for ``cpu`` need."""
    monkeypatch.setattr(onnxruntime, "__version__", "1.31.1")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])


def present(monkeypatch: pytest.MonkeyPatch, gpu: PresentGpu | None, lacks: str | None = None) -> None:
    monkeypatch.setattr(choice, "present_gpu", lambda: gpu)
    monkeypatch.setattr(target_choice, "_torch_obstacle", lambda *_: lacks)
    monkeypatch.setattr(
        target_choice, "_missing_package", lambda target: None if target.backend == "onnxruntime-cuda" else "not here"
    )
    if lacks is not None:
        monkeypatch.setattr(target_choice, "_missing_package", lambda target: lacks)


def test_the_processor_is_timed_where_it_can_be_or_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    present(monkeypatch, L40)
    assert measured_target("fp16") == "cpu" and measured_target("fp16", gpu_first=True) == "cuda"
    assert measured_target("bf16", "cuda") == "cuda"
    with pytest.raises(TargetError, match=r"timed here in bf16: cpu: .*no bf16 kernels.*--costs none"):
        measured_target("bf16", "cpu")


def test_the_gpu_is_timed_where_onnx_runtime_is_its_own(onnxruntime_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against "cannot load" after an hour of training, and a refusal on a GPU with torch, which every calibration has."""
    present(monkeypatch, L40)
    assert measured_target("fp16") == "cuda"
    monkeypatch.setattr(target_choice, "_missing_package", lambda target: "no CUDA provider")
    assert measured_target("bf16") == "torch"


@pytest.mark.parametrize(("gpu", "lacks"), [(None, None), (L40, "libcublas.so.13 is missing")])
def test_what_cannot_be_timed_is_refused_by_name(
    onnxruntime_gpu: None, monkeypatch: pytest.MonkeyPatch, gpu: PresentGpu | None, lacks: str | None
) -> None:
    present(monkeypatch, gpu, lacks)
    with pytest.raises(TargetError, match=r"cpu: needs ONNX Runtime 1.32 or newer, here is onnxruntime(-gpu)? 1.31.1") as refused:
        measured_target("fp16")
    assert (f"cuda: {lacks}" in str(refused.value)) == (lacks is not None)
