"""Several targets of one traced model: shared files, separate files, and cleanup after a failure."""

import io
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from export.stub_calibration import exit_tensors
from rich.console import Console
from targets.tiny_graphs import SLOTS, copy_of, traced
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.manifest import TargetInfo
from tide_runtime.errors import TargetError
from tide_runtime.machine_cache import CachedFiles

from tide_export.graphs.exit_graphs import exit_graph_model
from tide_export.passes.base import LoweringContext
from tide_export.progress import ExportProgress
from tide_export.targets import TARGETS
from tide_export.targets.base import BuildJob, Target
from tide_export.targets.build_targets import BuiltTargets, Cuts, build_targets
from tide_export.targets.engines import step_profiles
from tide_export.targets.onnxruntime import OnnxFiles
from tide_export.weights.quantized_weight import QuantizedWeight


class FailingBuilder:
    """A builder that writes half of its files and raises ``error``."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def check(self, target: Target) -> None:
        pass

    def build(self, target: Target, lowered, job: BuildJob) -> TargetInfo:
        folder = job.directory / "engines" / target.name
        folder.mkdir(parents=True)
        (folder / "segment_0.engine").write_bytes(b"half")
        raise self.error


CONTEXT = LoweringContext(SLOTS)
EXIT, HIDDEN = ExitInfo(1, "linear", "mlp", 0.5), 64
SM89 = 1 << 3  # in the header of TensorRT-RTX 1.7, whose bits are the capabilities that an engine is for
BROKEN = replace(TARGETS["rtx-sm_89"], name="broken", builder=FailingBuilder(TargetError("segment_1 cannot be parsed")))


def make(
    targets: list[Target],
    folder: Path,
    cache: Path | None = None,
    rebuild: bool = False,
    context: LoweringContext = CONTEXT,
    progress: ExportProgress | None = None,
) -> tuple[BuiltTargets, BuildJob]:
    directory, workspace = folder / "bundle", folder / "workspace"
    for path in (directory, workspace):
        path.mkdir(parents=True)
    profiles, engines = step_profiles(2, 0, SLOTS), CachedFiles(cache or folder / "cache")
    job = BuildJob(directory, workspace, "fp16", profiles, progress or ExportProgress(quiet=True), engines, rebuild)
    exit_graph = exit_graph_model(EXIT, exit_tensors(EXIT, HIDDEN), HIDDEN, "fp16")
    cuts = Cuts([1], [exit_graph])
    with closing(job):
        return build_targets(copy_of(traced("llama").trace), targets, cuts, context, job, lambda lowered: None), job


def files(job: BuildJob) -> set[str]:
    return {path.relative_to(job.directory).as_posix() for path in job.directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TargetError("segment_1 cannot be parsed"), "segment_1 cannot be parsed"),
        (RuntimeError("CUDA error 999"), "RuntimeError: CUDA error 999"),
    ],
)
def test_a_failed_target_leaves_the_others_whole(error, said, tmp_path):
    """An error in one target would lose the bundle of the others, or leave half an engine in it."""
    built, job = make([replace(BROKEN, builder=FailingBuilder(error)), TARGETS["cpu"]], tmp_path)
    assert list(built.targets) == ["cpu"]
    assert {*built.targets["cpu"].graphs.values(), built.targets["cpu"].weights} == files(job)
    assert job.progress.failures == {"broken": f"broken: {said}"}
    assert {tensor.name for tensor in built.graphs[0].inputs} >= {"input_ids", "query_seqlens"}


def test_onnx_targets_share_their_weights(tmp_path):
    """A bundle for the processor and for GPUs would hold the model twice."""
    both, job = make([TARGETS["cpu"], TARGETS["cuda"]], tmp_path / "both")
    _, alone = make([TARGETS["cpu"]], tmp_path / "alone")
    assert {target.weights for target in both.targets.values()} == {"onnx/weights.bin"}
    sizes = [(made.directory / "onnx/weights.bin").stat().st_size for made in (job, alone)]
    assert sizes[0] == sizes[1] > 0


def test_dequantised_weights_are_said_for_each_target(tmp_path):
    """A bundle would be four times as large, and as slow, as its weights let expect."""
    rows, columns = traced("llama").model.lm_head.weight.shape
    head = QuantizedWeight(8, np.full((rows, columns), 128, np.uint8), np.ones((rows, 1), np.float32))
    printed = io.StringIO()
    progress = ExportProgress(Console(file=printed, width=200))
    writers = [replace(TARGETS[name], builder=OnnxFiles()) for name in ("cpu", "rtx-sm_89", "rtx-sm_75")]
    make(writers, tmp_path, context=LoweringContext(SLOTS, {"lm_head.weight": head}), progress=progress)
    notes = [line.strip() for line in printed.getvalue().splitlines() if "dequantised" in line]
    assert notes == [
        "rtx-sm_89: low-bit weights that are dequantised: 1, because the target multiplies with weights of 4 bits, not 8",
        "rtx-sm_75: low-bit weights that are dequantised: 1, because the target has no products with low-bit weights",
    ]


def test_nothing_built_is_an_error(tmp_path):
    """An empty bundle would be written, and fail where it is loaded."""
    with pytest.raises(TargetError, match="segment_1 cannot be parsed"):
        make([BROKEN], tmp_path)


def test_engines_are_built_once_and_described(tmp_path, monkeypatch):
    """Every export would take minutes again, or an engine of another model, precision or kind of step would be taken."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'tide-llm[rtx]'")
    target = TARGETS["rtx-sm_89"]
    built, job = make([target], tmp_path / "first", tmp_path / "cache")
    info = built.targets["rtx-sm_89"]
    assert set(info.graphs.values()) == files(job) == {f"engines/rtx-sm_89/{name}.engine" for name in info.engines}
    assert (info.weights, info.compute, info.tool) == (None, [89], f"tensorrt-rtx {_version()}")
    assert [profile.name for profile in info.profiles] == ["decode", "prefill"]
    assert {name: (engine.attention, engine.attentions) for name, engine in info.engines.items()} == {
        "segment_0": ("fused", 1),
        "segment_1": ("fused", 1),
        "head": ("none", 0),
        "exit_1": ("none", 0),
    }
    assert [tensor.name for tensor in info.engines["exit_1"].outputs] == ["score", "hidden_out"]
    assert all(engine.build_seconds > 0 for engine in info.engines.values())
    header = (job.directory / info.graphs["segment_0"]).read_bytes()[:64]
    assert int.from_bytes(header[32:36], "little") == SM89

    def build_nothing(*_: object) -> None:
        raise TargetError("built again")

    monkeypatch.setattr("tide_export.targets.engines.build_engine", build_nothing)
    again, second = make([target], tmp_path / "second", tmp_path / "cache")
    assert again.targets == built.targets
    for file in info.graphs.values():
        assert (second.directory / file).read_bytes() == (job.directory / file).read_bytes()
    with pytest.raises(TargetError, match="built again"):
        make([target], tmp_path / "third", tmp_path / "cache", rebuild=True)


def _version() -> str:
    from importlib.metadata import version

    return version("tensorrt-rtx")
