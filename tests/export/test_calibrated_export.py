"""Export with a calibration: the bundle has its exits; an invalid calibration is refused before any work."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from export.architectures import LAYERS, tiny_model
from export.stub_calibration import write_calibration
from rich.console import Console
from safetensors.numpy import load_file, save_file
from tide_runtime import Engine, EngineOptions, GenerationParams, ThreadOptions
from tide_runtime.bundle.calibration import CalibrationInfo, ExitInfo
from tide_runtime.bundle.manifest import read_manifest
from tide_runtime.depth.options import DepthOptions
from tide_runtime.errors import CalibrationError, ParamsError, VerificationError
from tiny_tokenizer import write_byte_tokenizer

from tide_export import ExportConfig, export
from tide_export.calibration.exit_calibration import ExitCalibration, read_exit_calibration
from tide_export.config import checkpoint_layers
from tide_export.export_run import ExportRun, Written
from tide_export.load import fingerprint, load_model
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel
from tide_export.verify.verify_exits import verify_exits

HIDDEN = 64
EXITS = [
    ExitInfo(1, "tail:1", "mlp+max_probability", 0.6, 0.97, 0.4),
    ExitInfo(2, "tail:1", "max_probability", 0.5),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, stored in fp32."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("llama") / "model"
    tiny_model("llama").save_pretrained(folder)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def calibration(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exits for it, with a report. Shared: tests that break one take a copy."""
    folder = tmp_path_factory.mktemp("calibration") / "calib"
    write_calibration(folder, EXITS, fingerprint(load_model(str(model), "fp32")), LAYERS, HIDDEN)
    (folder / "report").mkdir()
    (folder / "report" / "index.html").write_text("<!doctype html><title>Calibration</title>")
    return folder


@pytest.fixture
def copy(calibration: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(calibration, tmp_path / "calib"))


@pytest.fixture(scope="module")
def bundle(model: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exported and verified, exits included."""
    out = tmp_path_factory.mktemp("bundle") / "engine"
    export(str(model), out, ExportConfig(calibration=str(calibration), max_seq_len=48, targets=("cpu", "torch")))
    return out


def test_the_bundle_carries_the_calibration(bundle, calibration):
    """The depth policies would have no exits, or find them at other layers than they were trained for."""
    manifest = read_manifest(bundle)
    assert manifest.calibration == read_exit_calibration(calibration).info
    assert manifest.checkpoints == [1, 2, 3]  # the exits', and where the tail begins
    graphs = {g.name: g for g in manifest.graphs}
    assert [(t.name, t.dtype, t.shape) for t in graphs["exit_1"].outputs] == [
        ("score", "fp32", ["batch", "seq"]),
        ("hidden_out", "fp32", ["batch", "seq", HIDDEN]),
    ]
    assert [t.name for t in graphs["exit_2"].outputs] == ["hidden_out"], "a router that only the head answers needs no score"
    assert (bundle / "calibration/report/index.html").is_file() and "calibration/report/index.html" in manifest.files


def test_target_torch_runs_the_exits(bundle):
    """Routers and heads with tails would compute something else on target torch."""
    texts, params = [], GenerationParams(max_new_tokens=12, ignore_eos=True, depth_budget=3.5)  # so that exits are evaluated
    for target in ("cpu", "torch"):
        options = EngineOptions(
            target=target, policy="exit", depth=DepthOptions(threshold=0.02), threads=ThreadOptions(1), device="cpu", max_batch=2
        )
        with Engine.load(bundle, options) as engine:
            texts.append(engine.generate([[5, 6, 7], [9]], params))
    assert [row.token_ids for row in texts[0]] == [row.token_ids for row in texts[1]]
    depths = {depth for row in texts[1] for depth in row.stats.token_depths}
    assert len(depths) > 1, "no token left early, or all did"


def test_verification_finds_a_changed_exit(bundle, calibration):
    """A pass or kernel that changes an exit would ship: tokens stop elsewhere than certified."""
    tensors = read_exit_calibration(calibration).tensors
    checks = verify_exits(bundle, tensors)
    assert [(c.graph, c.output) for c in checks] == [("exit_1", "hidden_out"), ("exit_1", "score"), ("exit_2", "hidden_out")]
    for name, output in (("router.1.up_bias", "score"), ("translator.1.up", "hidden_out")):
        for changed in (tensors[name] + np.float32(0.05), tensors[name] * np.float32(np.nan)):
            with pytest.raises(VerificationError, match=f"{output} of exit_1"):
                verify_exits(bundle, tensors | {name: changed})


# --- The fingerprint


def test_one_model_has_one_fingerprint(model, tmp_path):
    """A calibration made in fp32 would be refused by an fp16 export, or by a copy of the model in several files."""
    expected = fingerprint(load_model(str(model), "fp32"))
    half = load_model(str(model), "fp16")
    assert half.model.dtype == torch.float16 and fingerprint(half) == expected
    load_model(str(model), "fp32").model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    sharded = load_model(str(tmp_path / "sharded"), "bf16", tokenizer="none")
    assert len(sharded.weight_files) > 1 and fingerprint(sharded) == expected


def test_other_weights_have_another_fingerprint(model, tmp_path):
    """Exits would be accepted by a fine-tuned copy of their model, where they guess at random."""
    loaded = load_model(str(model), "fp32")
    in_memory = LoadedModel(loaded.model, None, "in memory")
    before = fingerprint(in_memory)
    with torch.no_grad():
        next(loaded.model.parameters())[5, 5] += 1
    loaded.model.save_pretrained(tmp_path / "changed")
    assert fingerprint(load_model(str(tmp_path / "changed"), "fp32", tokenizer="none")) != fingerprint(loaded)
    assert fingerprint(in_memory) != before


def test_another_models_calibration_is_refused(model, copy, tmp_path):
    """The bundle would draft at random under a certificate of another model."""
    edit(copy, lambda file: file.update(model="other/model", model_fingerprint="cd" * 32))
    with pytest.raises(CalibrationError, match=r"made for other/model \(weights cdcd.*not for.*tide-calibrate"):
        export(str(model), tmp_path / "engine", ExportConfig(calibration=str(copy)))
    assert not (tmp_path / "engine").exists()


# --- Broken calibrations


def edit(calibration: Path, change: Callable[[dict], object]) -> None:
    path = calibration / "calibration.json"
    file = json.loads(path.read_text())
    change(file)
    path.write_text(json.dumps(file))


def edit_tensors(calibration: Path, change: Callable[[dict], object]) -> None:
    path = calibration / "exits.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


BROKEN = {
    "no router": (
        lambda c: edit_tensors(c, lambda t: [t.pop(name) for name in list(t) if name.startswith("router")]),
        "lacks the tensors router.1.down, router.1.down_bias, router.1.up, router.1.up_bias",
    ),
    "half a translator": (lambda c: edit_tensors(c, lambda t: t.pop("translator.1.up")), "translator.1 needs down, up"),
    "another hidden size": (
        lambda c: edit_tensors(c, lambda t: t.update({"router.1.down": np.ones((11, 32), np.float32)})),
        "router.1.down takes 32 channels, the model has 64",
    ),
    "not a number": (
        lambda c: edit_tensors(c, lambda t: t.update({"router.1.up_bias": np.full(1, np.nan, np.float32)})),
        "router.1.up_bias must be finite float32",
    ),
    "truncated tensors": (
        lambda c: (c / "exits.safetensors").write_bytes((c / "exits.safetensors").read_bytes()[:-9]),
        "cannot read .*exits.safetensors",
    ),
    "a tail that skips nothing": (
        lambda c: edit(c, lambda f: [e.update(head="tail:3") for e in f["calibration"]["exits"]]),
        "tail:3 after 1 layers skips none",
    ),
    "a router of another version": (
        lambda c: edit(c, lambda f: f["calibration"]["exits"][1].update(router="oracle")),
        "router is 'oracle'",
    ),
    "no calibration": (lambda c: (c / "calibration.json").unlink(), "holds no calibration.json"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_calibrations(case, model, copy, tmp_path):
    """A traceback from deep inside the export, or a bundle whose exits are broken."""
    harm, words = BROKEN[case]
    harm(copy)
    with pytest.raises(CalibrationError, match=words):
        export(str(model), tmp_path / "engine", ExportConfig(calibration=str(copy)))
    assert [path.name for path in tmp_path.iterdir()] == ["calib"]


# --- Options


def test_checkpoints_follow_the_exits():
    """Exits without a cut could not be taken; a tail cut in two would be run in half."""
    info = CalibrationInfo(EXITS, 4, "exact")
    assert checkpoint_layers("auto", 8, info) == [1, 2, 7]
    assert checkpoint_layers("1,2,4,7", 8, info) == [1, 2, 4, 7]
    assert checkpoint_layers("auto", 8, CalibrationInfo([], 0, "full")) == []
    with pytest.raises(ParamsError, match=r"lack 1, 7, where .* to cut at 1, 2, 7"):
        checkpoint_layers("every:2", 8, info)
    with pytest.raises(ParamsError, match=r"cut through the last 2 layers.*nowhere after 6"):
        checkpoint_layers("1,6,7", 8, CalibrationInfo([ExitInfo(1, "tail:2", "mlp", 0.5)], 4, "exact"))


@pytest.fixture
def quick(calibration: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Replace the calibration by a copy of ``calibration``; returns the recorded (source, data) pairs."""
    calls: list[tuple[str, str]] = []

    def calibrate(source: str, data: str, out: Path, **options: object) -> None:
        calls.append((source, data))
        shutil.copytree(calibration, out)

    monkeypatch.setattr("tide_calibrate.during_export.calibrate", calibrate)
    return calls


def instead_of_writing(monkeypatch: pytest.MonkeyPatch, write: Callable[..., object]) -> None:
    monkeypatch.setattr(ExportRun, "write", write)


def test_data_calibrates_first(model, calibration, quick, tmp_path, monkeypatch):
    """--data would do nothing, calibrate another model, or leave its working files behind."""
    given: list[ExitCalibration] = []

    whole = ExportRun.write

    def write(run: ExportRun) -> Written:
        assert isinstance(run.calibration, ExitCalibration)
        given.append(run.calibration)
        assert (given[0].directory / "report/index.html").is_file(), "the report is gone before it was copied"
        return whole(run)

    instead_of_writing(monkeypatch, write)
    export(str(model), tmp_path / "engine", ExportConfig(data="texts/", verify=False))
    assert quick == [(str(model), "texts/")]
    assert given[0].info == read_exit_calibration(calibration).info
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


@pytest.mark.parametrize("failure", [VerificationError("differs"), KeyboardInterrupt()])
def test_a_failed_export_keeps_the_calibration(failure, model, calibration, quick, tmp_path, monkeypatch):
    """Minutes of calibration would be lost to a full disk; an earlier one that was kept must survive the next failure."""

    def write(*_: object, **__: object) -> None:
        raise failure

    instead_of_writing(monkeypatch, write)
    console = Console(file=io.StringIO(), width=400)
    for _ in range(2):
        with pytest.raises(type(failure)):
            export(str(model), tmp_path / "engine", ExportConfig(data="texts/"), progress=ExportProgress(console))
    kept = [tmp_path / "engine.calibration", tmp_path / "engine.calibration-2"]
    assert sorted(tmp_path.iterdir()) == kept
    assert all(f"--calibration {path}" in console.file.getvalue() for path in kept)
    assert read_exit_calibration(kept[1]).info == read_exit_calibration(calibration).info


def test_without_exits_the_model_is_one_chain(model, tmp_path):
    """A calibration that found none worth a cut: the bundle must not be cut for nothing, and carry what was recommended."""
    folder = write_calibration(tmp_path / "calib", [], fingerprint(load_model(str(model), "fp32")), LAYERS, HIDDEN)
    export(str(model), tmp_path / "engine", ExportConfig(calibration=str(folder), max_seq_len=32))
    manifest = read_manifest(tmp_path / "engine")
    assert (manifest.checkpoints, len(manifest.segments)) == ([], 1)
    assert manifest.calibration is not None and manifest.calibration.exits == []
    loop = [3, 4, 5] * 6
    outputs = []
    for policy in ("auto", "full"):
        with Engine.load(tmp_path / "engine", EngineOptions(policy=policy, threads=ThreadOptions(1))) as engine:
            assert engine.policy.name == {"auto": "exact", "full": "full"}[policy]
            outputs.append(engine.generate(loop, GenerationParams(max_new_tokens=12, ignore_eos=True))[0].token_ids)
    assert outputs[0] == outputs[1]
