"""The distribution that brings the module ``onnxruntime``: several install the same folder."""

import onnxruntime
import pytest
from tide_runtime.backends.onnxruntime import distribution
from tide_runtime.backends.onnxruntime.distribution import runs_padded_attention

GPU, CPU = "onnxruntime-gpu", "onnxruntime"


@pytest.mark.parametrize(
    ("installed", "imported", "providers", "expected"),
    [
        ({GPU: "1.31.1"}, "1.31.1", ["CUDAExecutionProvider"], GPU),
        ({CPU: "1.32.0", GPU: "1.31.1"}, "1.31.1", ["CUDAExecutionProvider"], GPU),
        ({GPU: "1.31.1", CPU: "1.32.0"}, "1.32.0", [], CPU),
        ({CPU: "1.32.0", GPU: "1.32.0"}, "1.32.0", ["CUDAExecutionProvider"], GPU),
        ({GPU: "1.32.0", CPU: "1.32.0"}, "1.32.0", [], CPU),
        ({}, "1.33.0", [], CPU),
    ],
)
def test_the_one_that_is_imported_is_named(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], imported: str, providers: list[str], expected: str
) -> None:
    """Guards against an export that fails after minutes because a manifest cannot name the release of ONNX Runtime."""
    monkeypatch.setattr(distribution, "packages_distributions", lambda: {"onnxruntime": list(installed)})
    monkeypatch.setattr(distribution, "version", installed.__getitem__)
    monkeypatch.setattr(onnxruntime, "__version__", imported)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    assert distribution.distribution() == (expected, imported)


@pytest.mark.parametrize(("release", "runs"), [("1.31.1", False), ("1.32.0", True), ("1.33.0rc1", True), ("2.0.0", True)])
def test_releases_that_run_bundles_for_the_processor(monkeypatch: pytest.MonkeyPatch, release: str, runs: bool) -> None:
    monkeypatch.setattr(onnxruntime, "__version__", release)
    assert runs_padded_attention() == runs
