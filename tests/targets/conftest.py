"""Machines that nobody here has: a GPU, and a TensorRT that writes down what it is asked."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from targets.recording_tensorrt import Recording
from tide_runtime.targets.gpu_probe import PresentGpu

from tide_export.targets import trt


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[PresentGpu | None, str], Recording]:
    """``machine(gpu, version)``: a GPU that is present, and a TensorRT that is installed."""

    def make(gpu: PresentGpu | None, version: str) -> Recording:
        recording = Recording(version)
        monkeypatch.setitem(sys.modules, "tensorrt", recording.trt)
        monkeypatch.setattr(trt, "present_gpu", lambda: gpu)
        monkeypatch.delenv("TIDE_PLUGINS_LIBRARY", raising=False)
        return recording

    return make
