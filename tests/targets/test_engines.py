"""Engine builds with a fake TensorRT: cache keys, progress, errors and interruption."""

import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from rich.progress import Progress
from targets.recording_tensorrt import Recording
from tide_runtime.errors import TargetError
from tide_runtime.machine_cache import CachedFiles

from tide_export.graphs.cut import CutGraph
from tide_export.progress import ExportProgress
from tide_export.targets import TARGETS, engines
from tide_export.targets.base import BuildJob
from tide_export.targets.engines import step_profiles
from tide_export.targets.lower import LoweredModel

HIDDEN = 32
H100 = TARGETS["trt-sm_90"]
# The inputs of an engine's cache key.
INPUTS = {
    "target": H100,
    "tool": "tensorrt 11.4.0",
    "dtype": "fp16",
    "profiles": step_profiles(max_batch=4, draft_limit=0, max_seq_len=64),
    "weight": 1.0,
    "activation": "Relu",
}


def product(weight: float, activation: str) -> ir.Model:
    """activation(hidden × W): a W full of ``weight``, large enough to lie beside the graph."""
    hidden = ir.val("hidden", dtype=ir.DataType.FLOAT16, shape=["batch", "seq", HIDDEN])
    weights = ir.val("W", const_value=ir.tensor(np.full((HIDDEN, HIDDEN), weight, np.float16), name="W"))
    multiply = ir.node("MatMul", [hidden, weights])
    activate = ir.node(activation, multiply.outputs)
    (result,) = activate.outputs
    result.name, result.dtype, result.shape = "hidden_out", hidden.dtype, hidden.shape
    nodes = [multiply, activate]
    return ir.Model(
        ir.Graph([hidden], [result], nodes=nodes, initializers=[weights], opset_imports={"": 24}, name="product"), ir_version=10
    )


def build(recording: Recording, folder: Path, progress: ExportProgress | None = None, **change: object) -> BuildJob:
    """An export into ``folder``, with `INPUTS` changed by ``change``; exports of one test share their cache."""
    inputs = INPUTS | change
    directory, workspace = folder / "bundle", folder / "workspace"
    for path in (directory, workspace):
        path.mkdir(parents=True)
    cache, progress = CachedFiles(folder.parent / "cache"), progress or ExportProgress(quiet=True)
    job = BuildJob(directory, workspace, inputs["dtype"], inputs["profiles"], progress, cache)
    lowered = LoweredModel([CutGraph("segment_0", product(inputs["weight"], inputs["activation"]), (0, 1))], [], [])
    engines.build_engines(inputs["target"], recording.trt, inputs["tool"], lambda *_: None, lowered, job)
    return job


@pytest.mark.parametrize(
    "change",
    [
        {"target": TARGETS["trt-sm_80"]},
        {"target": replace(H100, machine=replace(H100.machine, compute=(90, 100)))},
        {"tool": "tensorrt 11.5.0"},
        {"dtype": "bf16"},
        {"profiles": step_profiles(max_batch=8, draft_limit=0, max_seq_len=64)},
        {"weight": 2.0},
        {"activation": "Tanh"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_input_is_part_of_the_key(change, tmp_path):
    """The cache would return an engine of another GPU, release, precision, profile or model."""
    recording = Recording("11.4.0")
    build(recording, tmp_path / "first")
    build(recording, tmp_path / "same")
    assert len(recording.builds) == 1
    build(recording, tmp_path / "changed", **change)
    assert len(recording.builds) == 2


def test_a_new_build_version_makes_new_engines(tmp_path, monkeypatch):
    """Cached engines would miss a repair of a later tide-llm."""
    recording = Recording("11.4.0")
    build(recording, tmp_path / "before")
    monkeypatch.setattr(engines, "BUILD_VERSION", engines.BUILD_VERSION + 1)
    build(recording, tmp_path / "after")
    assert len(recording.builds) == 2


@pytest.mark.parametrize(
    "doing, said", [("parsing", "parsing segment_0"), ("building", "building trt-sm_90 segment_0")], ids=["parsing", "building"]
)
def test_an_error_in_the_log_ends_the_build(doing, said, tmp_path):
    """TensorRT calls some wrong networks built, with nothing but a line in its log: such an engine would be shipped, and kept."""
    recording = Recording("11.4.0")
    recording.errors[doing] = "a scale is\n  not positive"
    with pytest.raises(TargetError, match=f"^{said}: TensorRT reports a scale is not positive. Please report"):
        build(recording, tmp_path / "first")
    recording.errors.clear()
    built = len(recording.builds)
    build(recording, tmp_path / "second")
    assert len(recording.builds) == built + 1


def test_the_bar_follows_the_builder(tmp_path, monkeypatch):
    """A build of minutes would stand still on the screen, or jump between the steps of phases within phases."""
    shown: list[tuple[int, int | None]] = []
    monkeypatch.setattr(Progress, "update", lambda bar, task, completed, total: shown.append((completed, total)))
    build(Recording("11.4.0"), tmp_path / "first")
    assert shown == [(0, 2), (0, 4), (1, None), (2, None)]


def test_ctrl_c_ends_the_builders_work(tmp_path, monkeypatch):
    """The user would wait until the builder is through; or an exception would get into it, which is no Python code."""
    recording, progress = Recording("11.4.0"), ExportProgress(quiet=True)
    monkeypatch.setattr(Progress, "update", lambda *_, **__: progress.interrupt(signal.SIGINT, None))
    with pytest.raises(KeyboardInterrupt):
        build(recording, tmp_path / "first", progress)
    assert recording.goes_on == [False, False, False]
