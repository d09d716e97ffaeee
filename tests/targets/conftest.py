"""Fake machines: a GPU, and a TensorRT module that records its calls."""

import sys
from collections.abc import Callable

import pytest
from targets.recording_tensorrt import Recording
from tide_runtime.targets.gpu_probe import PresentGpu

from tide_export.targets import trt


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[PresentGpu | None, str], Recording]:
    """``machine(gpu, version)``: fake a present GPU and an installed TensorRT."""

    def make(gpu: PresentGpu | None, version: str) -> Recording:
        recording = Recording(version)
        monkeypatch.setitem(sys.modules, "tensorrt", recording.trt)
        monkeypatch.setattr(trt, "present_gpu", lambda: gpu)
        return recording

    return make
