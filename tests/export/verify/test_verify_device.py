"""Targets of GPUs are held to the eager model where such a GPU is here, and bundles say what was not verified."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from cuda_in_fp32 import cuda_in_fp32
from export.architectures import MAX_POSITIONS, tiny_model
from runtime.host_device import HostDevice
from tide_runtime.backends import BACKENDS
from tide_runtime.backends.onnxruntime.cuda import OnnxRuntimeCudaBackend
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.manifest import read_manifest
from tide_runtime.cli.inspect import _verified, bundle_facts
from tide_runtime.errors import TargetError, VerificationError
from tide_runtime.targets import target_choice
from tide_runtime.targets.gpu_probe import PresentGpu

from tide_export.config import ExportConfig
from tide_export.export import write_bundle
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel
from tide_export.verify import verify_targets as module
from tide_export.verify.check_results import GraphCheck, PromptCheck
from tide_export.verify.verify_bundle import eager_reference
from tide_export.verify.verify_device import verify_on_device
from tide_export.verify.verify_targets import verify_targets

L40 = PresentGpu("NVIDIA L40", 89)
LOADED = LoadedModel(tiny_model("llama"), None, "llama")
QUIET = ExportProgress(quiet=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose memory is this process's, and ONNX Runtime's CPU kernels in place of its own."""
    monkeypatch.setattr(module, "present_gpu", lambda: L40)
    monkeypatch.setattr(target_choice, "_missing_package", lambda target: None)
    monkeypatch.setitem(BACKENDS, "onnxruntime-cuda", on_host)


def on_host(bundle: Bundle, target: str, threads: object, *_: object) -> OnnxRuntimeCudaBackend:
    return OnnxRuntimeCudaBackend.load(bundle, target, threads, HostDevice(), ("CPUExecutionProvider", {}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle for the processor and GPUs that was exported without verification. Shared: tests must not change it."""
    folder = tmp_path_factory.mktemp("bundle")
    config = ExportConfig(checkpoints="1,2", max_seq_len=MAX_POSITIONS // 2, verify=False, targets=("cpu", "cuda", "torch"))
    with cuda_in_fp32():
        manifest, checks = write_bundle(LOADED, folder, config, QUIET)
    assert {info.verified for info in manifest.targets.values()} == {"not verified: the export had --no-verify"} and not checks
    return folder


def test_a_target_is_verified_where_its_gpu_is(gpu: None, directory: Path) -> None:
    """Guards against bundles of GPUs that nothing has ever compared with the model."""
    found = verify_targets(LOADED, directory, "fp32", QUIET).on
    assert found["cuda"] == "on NVIDIA L40" and found["cpu"].startswith("on a processor, ")


def test_every_segment_and_form_is_compared(gpu: None, directory: Path, tmp_path: Path) -> None:
    """Guards against a form of a segment that is wrong and never runs here: a fault has to name its segment."""
    reference = eager_reference(LOADED, directory)
    checks = verify_on_device(Bundle.open(directory), "cuda", reference, "fp32")
    graphs = [(check.graph.split(",")[0], check.layers) for check in checks if isinstance(check, GraphCheck)]
    assert graphs == [(f"cuda segment_{n}", layers) for n, layers in enumerate([(0, 1), (1, 2), (2, 4)]) for _ in range(2)]
    assert len([check for check in checks if isinstance(check, PromptCheck)]) == len(reference.texts)

    weights = np.fromfile(directory / "onnx" / "weights.bin", np.float32)
    copy = Path(shutil.copytree(directory, tmp_path / "wrong"))
    (weights * np.float32(1.01)).tofile(copy / "onnx" / "weights.bin")
    with pytest.raises(VerificationError, match="differs from the eager model: cuda segment_0"):
        verify_on_device(Bundle.open(copy, verify=False), "cuda", reference, "fp32")


def test_what_is_not_verified_is_said(directory: Path) -> None:
    """Guards against an inspection that looks the same for a bundle that was compared and for one that was not."""
    found = verify_targets(LOADED, directory, "fp32", QUIET).on
    assert found["cuda"].startswith("not verified: needs a GPU")
    assert found["torch"] == found["cpu"] and found["cpu"].startswith("on a processor, ")  # torch runs on both
    facts = bundle_facts(read_manifest(directory))["targets"]["cuda"]["verified"]
    assert facts == _verified(facts) == "not verified: the export had --no-verify"
    assert _verified("on NVIDIA L40") == "held to the eager model on NVIDIA L40"
    assert _verified("").startswith("not recorded")


def test_a_gpu_that_is_too_small_leaves_the_target_unverified(
    gpu: None, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an export that is lost after an hour because the GPU is busy."""

    def full(*_: object) -> OnnxRuntimeCudaBackend:
        raise TargetError("GPU 0 has no 40 MiB left")

    monkeypatch.setitem(BACKENDS, "onnxruntime-cuda", full)
    assert verify_targets(LOADED, directory, "fp32", QUIET).on["cuda"] == "not verified: GPU 0 has no 40 MiB left"
