"""TensorRT targets up to the builder's call, with a fake module that records its calls. No engine is built here."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
from export.passes.one_attention import SLOTS, one_attention
from export.stub_calibration import exit_tensors
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.bundle.engine_info import ProfileInfo
from tide_runtime.errors import TargetError
from tide_runtime.machine_cache import CachedFiles
from tide_runtime.targets.gpu_probe import PresentGpu

from tide_export.config import TrtOptions
from tide_export.graphs.cut import CutGraph
from tide_export.graphs.exit_graphs import exit_graph_model
from tide_export.passes.base import LoweringContext, run_passes
from tide_export.progress import ExportProgress
from tide_export.targets import TARGETS, router_plugin
from tide_export.targets.base import BuildJob
from tide_export.targets.choice import check_options
from tide_export.targets.lower import LoweredModel

V100, H200 = PresentGpu("Tesla V100", 70), PresentGpu("NVIDIA H200", 90)
PROFILES = [ProfileInfo("decode", [1, 1, 4], [1, 1, 3]), ProfileInfo("prefill", [1, 1, 4], [1, 16, 16])]


def lowered_for_v100() -> LoweredModel:
    model = one_attention(ir.DataType.FLOAT16, heads=4, window=0, softcap=0.0)
    run_passes(model, TARGETS["trt-sm_70"].pieces, LoweringContext(SLOTS))
    return LoweredModel([CutGraph("segment_0", model, (0, 1))], [], [])


def job(folder: Path, **options: bool) -> BuildJob:
    directory, workspace = folder / "bundle", folder / "workspace"
    for path in (directory, workspace):
        path.mkdir(parents=True)
    cache, progress = CachedFiles(folder.parent / "cache" / "engines"), ExportProgress(quiet=True)
    return BuildJob(directory, workspace, "fp16", PROFILES, progress, cache, trt=TrtOptions(**options))


def build(name: str, work: BuildJob, lowered: LoweredModel | None = None):
    return TARGETS[name].builder.build(TARGETS[name], lowered or lowered_for_v100(), work)


def with_router() -> LoweredModel:
    info = ExitInfo(1, "identity", "mlp", 0.5)
    return LoweredModel([*lowered_for_v100().graphs, exit_graph_model(info, exit_tensors(info, 4), 4, "fp16")], [], [])


def test_an_engine_for_v100(machine, tmp_path):
    """An engine for V100, which CI lacks, would be compiled with wrong shapes, precision or streams."""
    recording = machine(V100, "10.4.0")
    work = job(tmp_path / "a")
    info = build("trt-sm_70", work)
    ((name, config),) = recording.builds
    assert name == "segment_0" and recording.parsed[0].name == "segment_0.onnx"
    decode, prefill = config.profiles
    assert decode["write_index"] == ((1,), (1,), (4,)) and decode["hidden"] == ((1, 1, 4), (1, 1, 4), (4, 3, 4))
    assert prefill["key_cache_0"] == ((1, 2, SLOTS, 16), (1, 2, SLOTS, 16), (4, 2, SLOTS, 16))
    assert config.max_aux_streams == 0 and not config.flags
    assert (work.directory / info.graphs["segment_0"]).read_bytes() == b"plan of segment_0"
    assert info.tool == "tensorrt 10.4.0 on Tesla V100" and info.compute == [70] and info.weights is None
    engine = info.engines["segment_0"]
    assert engine.aliases == {}  # caches are copied: see attention_primitives
    assert {t.dtype for t in (*engine.inputs, *engine.outputs) if "_cache_" in t.name} == {"fp16"}


def test_timings_are_kept(machine, tmp_path):
    """Kernels would be timed anew in every export; a damaged cache would end it, or take another driver's timings."""
    recording = machine(V100, "10.4.0")
    build("trt-sm_70", job(tmp_path / "a"))
    (path,) = (tmp_path / "cache" / "timings").iterdir()
    assert path.read_bytes() == b"timings of " and "V100" in path.name
    build("trt-sm_70", job(tmp_path / "b", version_compatible=True))
    assert recording.builds[1][1].timing_cache.known == b"timings of "
    path.write_bytes(b"damaged")
    build("trt-sm_70", job(tmp_path / "c", strip_weights=True))
    assert recording.builds[2][1].timing_cache.known == b""


def test_options(machine, tmp_path):
    """Options would be ignored, or a stripped engine would lack the files to refit it."""
    recording = machine(H200, "11.4.0")
    work = job(tmp_path / "a", hardware_compatible=True, version_compatible=True, strip_weights=True)
    info = build("trt-sm_90", work)
    config = recording.builds[0][1]
    assert config.hardware_compatibility_level == "AMPERE_PLUS"
    assert config.flags == {"VERSION_COMPATIBLE", "STRIP_PLAN", "REFIT_IDENTICAL"}
    assert info.compute == [80, 86, 87, 89, 90, 100, 103, 110, 120, 121]
    assert info.tool == "tensorrt 11.4.0 on NVIDIA H200, hardware-compatible, version-compatible, strip-weights"
    engine = work.directory / info.graphs["segment_0"]
    assert engine.with_suffix(".onnx").is_file() and engine.with_suffix(".weights").is_file()


@pytest.fixture
def plugins(monkeypatch):
    """The router's plugins without their kernels: what they were given, by name of the tensor they return."""
    given: dict[str, tuple] = {}

    def add(network, hidden, *weights, epsilon):
        made = SimpleNamespace(name="of the plugin", dtype=SimpleNamespace(name="FLOAT"))
        given["score"] = (made, hidden, weights, epsilon)
        return made

    monkeypatch.setattr(router_plugin, "add_exit_router", add)
    monkeypatch.setattr(router_plugin, "registered", lambda: None)
    monkeypatch.setattr(router_plugin, "ptx", lambda: "kernels")
    return given


def test_routers_are_tides_kernels(machine, plugins, tmp_path, monkeypatch):
    """Exits would score with slower operators, another exit's weights, or kernels of an older tide-llm from the cache."""
    recording, lowered = machine(H200, "11.4.0"), with_router()
    info = build("trt-sm_90", job(tmp_path / "a"), lowered)
    score, hidden, weights, epsilon = plugins["score"]
    assert "router plugin" in info.tool and recording.outputs["exit_1"] == [score] and score.name == "score"
    assert hidden.name == "hidden" and epsilon == pytest.approx(1e-6)
    tensors = exit_tensors(ExitInfo(1, "identity", "mlp", 0.5), 4)
    for array, name in zip(weights, ("down", "down_bias", "up", "up_bias"), strict=True):
        np.testing.assert_array_equal(array, tensors[f"router.1.{name}"])
    assert [tensor.name for tensor in info.engines["exit_1"].outputs] == ["score"]
    built = len(recording.builds)
    monkeypatch.setattr(router_plugin, "ptx", lambda: "other kernels")
    build("trt-sm_90", job(tmp_path / "b"), lowered)
    assert len(recording.builds) == 2 * built


def no_compiler():
    raise TargetError("the package nvidia-cuda-nvrtc-cu12 is not installed")


@pytest.mark.parametrize(
    ("name", "gpu", "version", "options", "ptx", "said"),
    [
        ("trt-sm_90", H200, "11.4.0", {"strip_weights": True}, str, "neither for refitted nor for version-compatible"),
        ("trt-sm_90", H200, "11.4.0", {"version_compatible": True}, str, "neither for refitted nor for version-compatible"),
        ("trt-sm_70", V100, "10.4.0", {}, str, "10.4 has no ahead-of-time plugins"),
        ("trt-sm_90", H200, "11.4.0", {}, no_compiler, "because the package nvidia-cuda-nvrtc-cu12 is not installed"),
    ],
)
def test_where_routers_stay_operators_it_is_said(
    machine, plugins, tmp_path, monkeypatch, capsys, name, gpu, version, options, ptx, said
):
    """Exits would be slower without a word, an engine lack weights when it is loaded, or an export end after an hour."""
    machine(gpu, version)
    monkeypatch.setattr(router_plugin, "ptx", ptx)
    work = replace(job(tmp_path / "a", **options), progress=ExportProgress(quiet=False))
    assert "router plugin" not in build(name, work, with_router()).tool and not plugins
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "name, gpu, version, message",
    [
        ("trt-sm_90", None, "11.4.0", r"on a GPU of compute capability 9\.0 \(H100, .*here is none; export on such"),
        ("trt-sm_80", H200, "11.4.0", r"compute capability 8\.0 .*here is a NVIDIA H200 of 9\.0"),
        ("trt-sm_90", H200, "10.4.0", r"10\.4\.0 is installed, expected 11\.0 or newer; pip install 'tide-llm\[tensorrt\]'"),
        ("trt-sm_70", V100, "11.4.0", r"expected 10\.0 to 10\.4; pip install tensorrt-cu12==10\.4\.0"),
    ],
)
def test_what_cannot_be_built_here_is_explained(machine, name, gpu, version, message):
    """The user would get an ImportError, or an engine that the GPU cannot load."""
    machine(gpu, version)
    with pytest.raises(TargetError, match=message):
        TARGETS[name].builder.check(TARGETS[name])


@pytest.mark.parametrize(
    ("options", "targets", "said"),
    [
        ({"hardware_compatible": True}, ["trt-sm_70", "cpu"], "need Ampere or newer"),
        (
            {"strip_weights": True, "version_compatible": True},
            ["cpu", "rtx-sm_89"],
            "--version-compatible, --strip-weights: only",
        ),
    ],
)
def test_options_without_effect_are_refused(options, targets, said):
    """The build would fail on the GPU machine after the whole export, or ignore the options."""
    with pytest.raises(TargetError, match=said):
        check_options(TrtOptions(**options), [TARGETS[name] for name in targets])
    check_options(TrtOptions(), [TARGETS[name] for name in targets])
    check_options(TrtOptions(strip_weights=True), [TARGETS["cpu"]], ["trt-sm_90"])  # whose own reason is told later
