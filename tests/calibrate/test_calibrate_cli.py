"""End-to-end tests of ``tide-calibrate``: a tiny model and text in, a calibration or an error message out."""

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrate.cost_model import table
from cli_in_process import Run, cli_runner
from rich.console import Console
from tide_calibrate import calibrate as calibrate_module
from tide_calibrate import cli, placed_exit, temporary_bundle, training_plan
from tide_calibrate import train as train_module
from tide_calibrate.calibrate import calibrate
from tide_calibrate.capture import compiled_pass, forward_pass
from tide_calibrate.capture.compiled_pass import CompiledPass
from tide_calibrate.capture.store import Capture
from tide_calibrate.config import CalibrationConfig, candidate_layers
from tide_calibrate.costs import model_costs
from tide_calibrate.costs.measure import save_costs
from tide_calibrate.costs.model_costs import measure_in_own_process
from tide_calibrate.exit_heads.sampled_vocabulary import SampledVocabulary
from tide_calibrate.model.frozen import FrozenModel
from tide_calibrate.placed_exit import GATE
from tide_calibrate.placement.candidates import EXACT
from tide_calibrate.rehearsal import DRAFT_HEAD, WITHOUT_HEAD, Rehearsal
from tide_calibrate.report import draw as draw_module
from tide_calibrate.report.draw import REPORT_NAME
from tide_calibrate.report.terminal import print_summary, recommendation_line
from tide_calibrate.temporary_bundle import TemporaryBundle
from tide_calibrate.traces.trace import SplitTrace
from tide_runtime.bundle.calibration import CostTable
from tide_runtime.errors import CalibrationError, ParamsError
from tiny_tokenizer import write_byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from tide_export.calibration.calibration_file import CALIBRATION_NAME, EXITS_NAME, read_calibration
from tide_export.calibration.exits_file import read_exits
from tide_export.config import ExportConfig, checkpoint_layers
from tide_export.export import quantize_loaded
from tide_export.load import fingerprint, load_model
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel

LAYERS = 6
TEXT = (Path(__file__).resolve().parents[2] / "LICENSE").read_text(encoding="utf-8")  # the same on every machine
DOCUMENTS = 12
SMALL = ("--candidates", "2,3", "--heads", "identity,linear,tail:1", "--window", "64", "--max-windows", "40", "--prompts", "16",
         "--new-tokens", "16", "--rank", "8", "--max-disagreement", "0.3")  # fmt: skip
CONFIG = CalibrationConfig(
    candidates="2,3", heads="identity,linear,tail:1", window=64, max_windows=40, prompts=16, new_tokens=16, rank=8,
    max_disagreement=0.3,
)  # fmt: skip


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1790000000")
    return cli_runner("tide-calibrate", cli.main, monkeypatch, capsys, columns=200)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten training, and replace rendering of charts: test_exit_heads.py, test_draft_head.py and test_report.py cover them."""
    monkeypatch.setattr(training_plan, "STEPS", 24)
    monkeypatch.setattr(training_plan, "STEPS_FROM_NEIGHBOUR", 24)
    monkeypatch.setattr(train_module, "_DRAFT_HEAD_STEPS", 40)  # 400 take more than half of a calibration here
    monkeypatch.setattr(train_module, "_REPLIES", train_module._MIN_REPLIES)
    monkeypatch.setattr(draw_module, "png", lambda figure: repr([axes.get_title() for axes in figure.axes]).encode())


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of files with equally many lines."""
    directory, lines = tmp_path_factory.mktemp("texts"), TEXT.splitlines(keepends=True)
    for number in range(DOCUMENTS):
        part = lines[number * len(lines) // DOCUMENTS : (number + 1) * len(lines) // DOCUMENTS]
        (directory / f"part_{number}.txt").write_text("".join(part), encoding="utf-8")
    return directory


def _save_model(directory: Path, change_in_late_layers: float) -> Path:
    """Save a tiny random Llama whose layers from the third on have their residual updates scaled by this factor."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=128, num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.3, eos_token_id=None, **sizes
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight.mul_(change_in_late_layers)
            layer.mlp.down_proj.weight.mul_(change_in_late_layers)
    model.save_pretrained(directory)
    write_byte_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose late layers hardly change the state, so that early exits agree most of the time."""
    return _save_model(tmp_path_factory.mktemp("models") / "agreeing", 0.03)


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    save_costs(table(layers=LAYERS), path)
    return path


@pytest.fixture(scope="module")
def calibrated(
    model: Path, texts: Path, costs: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Callable[..., tuple[object, ...]]]:
    """The output directory of the shared calibration, and its command line as a function of ``--out``."""
    shared = tmp_path_factory.mktemp("calibrations") / "calib"
    return shared, lambda out: (model, "--data", texts, "--out", out, "--costs", costs, *SMALL)


@pytest.fixture
def calib(calibrated: tuple[Path, Callable[..., tuple[object, ...]]], run: Run) -> Path:
    """The shared calibration, computed once; tests must not modify it."""
    out, command = calibrated
    if not out.exists():
        done = run(*command(out))
        assert done.code == 0, done.err
        (out.parent / "stdout").write_text(done.out)
    return out


@pytest.mark.slow
def test_the_way_of_large_models(
    run: Run, model: Path, texts: Path, costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled segments capture and a sampled vocabulary trains, but thresholds and certificate are of the whole vocabulary."""
    original, passes, traced = SampledVocabulary.of, [], []

    def sampled(capture: Capture, frozen: FrozenModel) -> SampledVocabulary | None:
        return original(capture, frozen, size=64)

    def tracing(module: Any) -> None:
        trace = module.trace_exits

        def spy(*args: Any, vocabulary: SampledVocabulary | None = None, **options: Any) -> SplitTrace:
            exits = options["exits"] if "exits" in options else args[3]
            traced.append((args[2], vocabulary is None, set(exits)))
            return trace(*args, vocabulary=vocabulary, **options)

        monkeypatch.setattr(module, "trace_exits", spy)

    class Watched(CompiledPass):
        def run(self, *arguments: Any) -> None:
            passes.append(1)
            super().run(*arguments)

    monkeypatch.setattr(SampledVocabulary, "of", sampled)
    monkeypatch.setattr(train_module, "_WORTH_EXPORTING", 0)
    monkeypatch.setattr(compiled_pass, "CompiledPass", Watched)
    tracing(train_module)
    tracing(placed_exit)
    done = run(model, "--data", texts, "--out", tmp_path / "calib", "--costs", costs, *SMALL)
    assert done.code == 0, done.err
    assert passes and "captured by PyTorch" not in done.err
    info = read_calibration(tmp_path / "calib").calibration
    chosen = {(exit.checkpoint, exit.head) for exit in info.exits}
    assert chosen and info.certificate is not None
    first = traced[:3]
    assert [(split, whole) for split, whole, _ in first] == [("test", False), ("threshold", False), ("test", False)]
    assert all(whole and exits <= first[0][2] for _, whole, exits in traced[3:])
    assert {split for split, _, exits in traced[3:] if chosen <= exits} == {"train", "threshold", "test"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calib"]
    assert not list((tmp_path / "calib").glob("bundle.*"))


@pytest.mark.slow
def test_low_bit_weights(run: Run, model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exits trained for other weights, or step costs of fp32 products that take several times as long."""
    measured = []

    def costs_of(loaded: LoadedModel, *_: object) -> CostTable:
        measured.append(loaded)
        return table(layers=LAYERS)

    monkeypatch.setattr("tide_calibrate.calibrate.measure_model_costs", costs_of)
    done = run(model, "--data", texts, "--out", tmp_path / "int4", "--weights", "int4", *SMALL)
    assert done.code == 0, done.err
    file, plain = read_calibration(tmp_path / "int4"), load_model(str(model), "fp32")
    rounded = quantize_loaded(plain, "int4", "rtn", ExportProgress(quiet=True))
    file.check_model(fingerprint(rounded), "agreeing", "int4 rtn")
    assert measured[0].quantized and measured[0].weights == "int4 rtn"
    info = file.calibration
    low, high = info.predicted_range["exact"]
    assert low <= info.predicted["exact"] <= high
    assert (info.recommended == "exact") == (info.predicted["exact"] >= GATE)
    assert f"exact {info.predicted['exact']:.2f}x ({low:.2f}–{high:.2f})" in " ".join(done.out.split())
    with pytest.raises(CalibrationError, match=r"made for agreeing .*…, int4 rtn\).*not for agreeing .*…, source\)"):
        file.check_model(fingerprint(plain), "agreeing", plain.weights)


HELPS = {
    "exact": Rehearsal(1.5, 1.4, 1.6, 9),
    WITHOUT_HEAD: Rehearsal(1.2, 1.1, 1.3, 9),
    DRAFT_HEAD: Rehearsal(1.25, 1.2, 1.3, 9),
}
IS_NOISE = {**HELPS, "exact": Rehearsal(1.23, 1.1, 1.35, 9), DRAFT_HEAD: Rehearsal(1.025, 0.99, 1.06, 9)}
COSTS = {
    "exact": Rehearsal(1.05, 1.0, 1.1, 9),
    WITHOUT_HEAD: Rehearsal(1.01, 0.9, 1.1, 9),
    DRAFT_HEAD: Rehearsal(0.98, 0.95, 1.0, 9),
}


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what is measured: the speeds of a policy with each candidate by its checkpoint, and then those of the policies."""

    def set_speeds(of_policies: list[dict[str, Rehearsal]], of_candidates: dict[str, dict[int, float]]) -> None:
        def rehearse(bundle: TemporaryBundle, prompts: object, new_tokens: int, policies: list[str], seconds: float) -> object:
            if seconds != placed_exit.CANDIDATE_SECONDS:
                return dict(of_policies.pop(0))
            assert bundle._calibration is not None and bundle._calibration.info.draft_head is None
            speed = of_candidates[policies[0]][bundle._calibration.info.exits[0].checkpoint]
            return {policies[0]: Rehearsal(speed, speed - 0.1, speed + 0.1, 9)}

        monkeypatch.setattr(calibrate_module, "measure_model_costs", lambda *_: table(layers=LAYERS))
        monkeypatch.setattr(placed_exit, "rehearse", rehearse)

    return set_speeds


SLOW = {2: 0.9, 3: 1.01}
CHOICES = {
    "the fastest": ({EXACT: {2: 1.1, 3: 1.3}}, 3),
    "the fastest by expectation among equals": ({EXACT: {2: 1.31, 3: 1.3}}, 2),
    "one that only exit gains from": ({EXACT: SLOW, "exit": {2: 0.9, 3: 1.2}}, 3),
    "none": ({EXACT: SLOW, "exit": SLOW}, None),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_exit_that_is_measured_to_be_fastest_is_kept(
    case: str, model: Path, texts: Path, tmp_path: Path, measures: Callable[..., None]
) -> None:
    """Breaks: step costs alone decide which exit a bundle is cut for, or it is cut although no exit pays."""
    speeds, chosen = CHOICES[case]
    measures([{"exact": Rehearsal(1.4, 1.3, 1.5, 9)}], speeds)
    file = calibrate(str(model), str(texts), tmp_path / "calib", replace(CONFIG, heads="identity", draft_head=False))
    info = file.calibration
    assert [exit.checkpoint for exit in info.exits] == ([] if chosen is None else [chosen])
    assert info.recommended == "exact" and info.predicted["exact"] == 1.4
    if chosen is None:
        assert "the best exit, identity after layer 3, is measured to give policy exact:router 1.01x" in file.refusal
        assert EXACT not in info.predicted and info.draft_limit == 0
    else:
        assert sum(info.exit_depths.values()) == pytest.approx(1, abs=1e-3)
        assert info.predicted[EXACT] == speeds[EXACT][chosen]  # measured too where it is not what pays
        assert info.predicted_range[EXACT] == pytest.approx([speeds[EXACT][chosen] - 0.1, speeds[EXACT][chosen] + 0.1])


def test_a_draft_head_stays_only_where_it_pays(model: Path, texts: Path, tmp_path: Path, measures: Callable[..., None]) -> None:
    """Breaks: every token waits for a head whose guesses gain less than they cost, or a head that gains is thrown away."""
    measures([HELPS, IS_NOISE, COSTS], {EXACT: {2: 1.2, 3: 1.2}})
    log = Console(file=io.StringIO(), width=400)
    outs, config = [tmp_path / name for name in ("helps", "is noise", "costs")], replace(CONFIG, heads="identity")
    calibrate(str(model), str(texts), outs[0], config, also={0.2: outs[1], 0.1: outs[2]}, progress=ExportProgress(log))
    helps, is_noise, costs = (read_calibration(out) for out in outs)
    assert helps.calibration.draft_head is not None and read_exits(outs[0] / EXITS_NAME).draft
    assert (helps.calibration.predicted["exact"], helps.draft_head_left_out) == (1.5, "")
    for out, file in zip(outs[1:], (is_noise, costs), strict=True):
        assert file.calibration.draft_head is None and not read_exits(out / EXITS_NAME).draft
        assert {*file.calibration.predicted_range} == {"exact", EXACT}
    assert (is_noise.calibration.predicted["exact"], is_noise.calibration.predicted_range["exact"]) == (1.2, [1.1, 1.3])
    assert (is_noise.calibration.recommended, costs.calibration.recommended) == ("exact", "full")
    said = (
        "exact ran at 1.230x full's speed with it and at 1.200x without: it gains +2.5% (-1.0% to +6.0% on other prompts of the"
    )
    summary = Console(file=io.StringIO(), width=400)
    print_summary(is_noise, summary)
    page = (outs[1] / REPORT_NAME / "index.html").read_text().replace("&#39;", "'")
    for text in (log.file.getvalue(), summary.file.getvalue(), page):  # type: ignore[attr-defined]
        assert said in text and "left out (tide-calibrate --draft-head keeps it)" in text
    assert "1.500x full's speed with it and at 1.200x without" in log.file.getvalue()  # type: ignore[attr-defined]
    measures([COSTS], {EXACT: {2: 1.2, 3: 1.2}})  # and who asks for a head gets it
    kept = calibrate(str(model), str(texts), tmp_path / "kept", replace(config, draft_head=True))
    assert kept.calibration.draft_head is not None and read_exits(tmp_path / "kept" / EXITS_NAME).draft
    assert (kept.calibration.predicted["exact"], kept.draft_head_left_out) == (1.05, "")


def test_a_certificate_against_the_original_counts_rounded_weights(
    run: Run, model: Path, texts: Path, costs: Path, tmp_path: Path
) -> None:
    """The bound would leave out what rounding changes; exits and `exact` are still trained on the model as it runs."""
    command = (model, "--data", texts, "--costs", costs, *SMALL, "--weights", "int8", "--heads", "identity")
    for out, options in (("own", ()), ("fp32", ("--reference", "fp32")), ("path", ("--reference", model))):
        done = run(*command, "--out", tmp_path / out, *options, "--max-disagreement", "0.5")
        assert done.code == 0, done.err
    own, fp32, path = (read_calibration(tmp_path / out) for out in ("own", "fp32", "path"))
    assert own.calibration.certificate is not None and own.calibration.certificate.reference == ""
    assert fp32.calibration.certificate is not None
    assert fp32.calibration.certificate == path.calibration.certificate
    assert fp32.calibration.certificate.reference == "the fp32 original agreeing"
    assert fp32.calibration.certificate.reference_sha256 == fingerprint(load_model(str(model), "fp32"))
    assert 0 < fp32.calibration.certificate.full_disagreement <= 0.5
    assert fp32.heads == own.heads  # agreement with the model's own last layer
    assert [(e.checkpoint, e.exact_threshold) for e in fp32.calibration.exits] == [
        (e.checkpoint, e.exact_threshold) for e in own.calibration.exits
    ]
    page = (tmp_path / "fp32" / REPORT_NAME / "index.html").read_text()
    assert "differs from the fp32 original agreeing at no more than 50.00%" in page
    assert not list(tmp_path.glob("*.work"))
    done = run(*command, "--out", tmp_path / "strict", "--reference", "fp32", "--max-disagreement", "0.001")
    assert done.code == 0, done.err
    strict = read_calibration(tmp_path / "strict")
    assert strict.calibration.certificate is None and all(e.exit_threshold is None for e in strict.calibration.exits)
    assert "quantised model alone disagrees with the reference" in strict.refusal
    assert "take more bits" in " ".join(done.out.split())


def test_a_calibration_holds_exits_for_the_exporter(calib: Path, model: Path) -> None:
    """tide-export needs exits of this model, their weights, a certificate and costs; and the certificate must be traceable."""
    file = read_calibration(calib)
    file.check_model(fingerprint(load_model(str(model), "fp32")), "agreeing")
    with pytest.raises(CalibrationError, match="made for agreeing"):
        file.check_model("ab" * 32, "other")
    info = file.calibration
    assert info.recommended == "exact" and 1.02 < info.predicted["exact"] == info.predicted[EXACT]
    assert info.exits and all(one.checkpoint in (2, 3) for one in info.exits)
    assert info.certificate is not None and info.certificate.measured < 0.3 and file.refusal == ""
    weights = read_exits(calib / EXITS_NAME)
    assert set(weights.translators) == {one.checkpoint for one in info.exits if one.head != "identity"}
    assert set(weights.routers) == {one.checkpoint for one in info.exits if one.has_mlp}
    heads = {(line.head, tuple(line.checkpoints)) for line in file.heads}
    assert heads == {(head, (2, 3)) for head in ("identity", "linear", "tail:1")}
    assert all(0.3 < share <= 1 for line in file.heads for share in [*line.text, *line.continuations])
    data = file.data
    assert sum(data.documents.values()) == DOCUMENTS and sum(data.tokens.values()) <= 40 * 64
    assert set(data.tokens) == set(data.sha256) == {"train", "threshold", "test"} and len(set(data.sha256.values())) == 3


def test_the_summary_is_printed_and_nothing_temporary_is_left(calib: Path) -> None:
    """A user would not learn what to do next, take a prediction for a measurement, or find captured states of gigabytes."""
    printed = " ".join((calib.parent / "stdout").read_text().split())
    info = read_calibration(calib).calibration
    for expected in ("identity", "tail:1", "Chosen exits", "Certificate: With 95% confidence", "Use policy exact"):
        assert expected in printed
    assert f"exact {info.predicted['exact']:.2f}x" in printed
    for text in (printed, (calib / REPORT_NAME / "index.html").read_text()):
        assert "predictions from step costs, not measured: exact" in text
    assert {path.name for path in calib.parent.iterdir()} == {"calib", "stdout"}
    assert {path.name for path in calib.iterdir()} == {CALIBRATION_NAME, EXITS_NAME, REPORT_NAME, "costs.json"}


def test_the_report_is_drawn_again(calib: Path, run: Run, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(calib, tmp_path / "copy"))
    (copy / REPORT_NAME / "index.html").unlink()
    done = run("report", copy)
    assert done.code == 0, done.err
    assert (copy / REPORT_NAME / "index.html").read_bytes() == (calib / REPORT_NAME / "index.html").read_bytes()
    assert "Use policy exact" in done.out


def test_other_folders_are_not_touched(calib: Path, calibrated: tuple, run: Run, tmp_path: Path) -> None:
    """An earlier calibration would be lost, or --force with a mistyped --out delete another folder."""
    before = (calib / CALIBRATION_NAME).read_bytes()
    done = run(*calibrated[1](calib))
    assert done.code == 2 and "exists already; choose another --out, or replace it with --force" in done.err
    assert (calib / CALIBRATION_NAME).read_bytes() == before
    (tmp_path / "unrelated.txt").write_text("other data")
    done = run(*calibrated[1](tmp_path), "--force")
    assert done.code == 2 and "is not a calibration" in done.err and (tmp_path / "unrelated.txt").exists()


def test_full_is_recommended_where_nothing_is_known_to_pay(
    texts: Path, costs: Path, model: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """No exit agrees where late layers are random: that is a result and no error. A run without costs predicts no speedup."""
    never_agreeing = _save_model(tmp_path_factory.mktemp("models") / "never_agreeing", 3.0)
    config = replace(CONFIG, heads="identity", max_disagreement=0.01)
    file = calibrate(str(never_agreeing), str(texts), tmp_path / "calib", config, costs=str(costs))
    assert (file.calibration.exits, file.calibration.recommended, file.calibration.certificate) == ([], "full", None)
    assert "is predicted to give policy exact:router" in file.refusal and "No exits pay" in recommendation_line(file)
    assert (tmp_path / "calib" / REPORT_NAME / "index.html").is_file()
    info = calibrate(str(model), str(texts), tmp_path / "none", replace(CONFIG, heads="identity"), costs="none").calibration
    assert (info.predicted, info.recommended, info.costs) == ({}, "full", None) and info.exits


def test_costs_are_measured_on_a_temporary_bundle(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default, --costs measure, must export segments of different depth, which the fit needs, and delete the bundle.

    Export and measurement are replaced by stubs, because they have tests of their own and take long.
    """
    exported: list[ExportConfig] = []
    monkeypatch.setattr(temporary_bundle, "write_bundle", lambda _loaded, _directory, config, *_: exported.append(config))
    monkeypatch.setattr(model_costs, "measure_in_own_process", lambda bundle, target, _file: (bundle.is_dir(), target))
    loaded = load_model(str(model), "fp32")
    assert model_costs.measure_model_costs(loaded, "fp32", tmp_path, "cpu") == (True, "cpu")
    edges = [0, *checkpoint_layers(exported[0].checkpoints, LAYERS), LAYERS]
    assert len({deep - shallow for shallow, deep in pairwise(edges)}) > 1
    assert exported[0].max_seq_len == 128  # the model's own limit
    assert not list(tmp_path.iterdir())
    with pytest.raises(CalibrationError, match=r"could not be measured \(.*nowhere.*--costs none"):  # of another process
        measure_in_own_process(tmp_path / "nowhere", "cpu", tmp_path / "costs.json")


def test_an_interrupted_run_resumes_and_gives_the_same_bytes(
    calib: Path,
    calibrated: tuple,
    model: Path,
    texts: Path,
    costs: Path,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The capture takes longest for a large model, so it must survive an interruption.

    Equal bytes also show that a calibration is reproducible, and that a further ε does not change the first calibration.
    """
    out, stricter = tmp_path / "calib", tmp_path / "stricter"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(placed_exit, "certify_exits", interrupt)  # by then the threshold text is captured too
        done = run(*calibrated[1](out))
    assert done.code == 130
    assert "run the same command to go on" in done.err
    assert not out.exists()
    assert (tmp_path / "calib.work").is_dir()
    with monkeypatch.context() as patched:
        patched.setattr(forward_pass, "sliced_logits", None)  # no batch is captured again
        calibrate(str(model), str(texts), out, CONFIG, also={0.2: stricter}, costs=str(costs))
    assert _contents(out) == _contents(calib)
    assert {path.name for path in tmp_path.iterdir()} == {"calib", "stricter"}
    other, info = read_calibration(stricter), read_calibration(calib).calibration
    assert (other.config["max_disagreement"], other.calibration.draft_limit) == (0.2, info.draft_limit)
    assert other.calibration.certificate is None or other.calibration.certificate.max_disagreement == 0.2
    assert [(e.checkpoint, e.head, e.exact_threshold) for e in other.calibration.exits] == [
        (e.checkpoint, e.head, e.exact_threshold) for e in info.exits
    ]


def _contents(directory: Path) -> dict[str, bytes]:
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


UNUSABLE = (
    ("--data", "./nowhere", "there is no file or directory ./nowhere"),
    ("--data", "one", "1 different documents, but at least 3 are needed"),
    ("--data", "short", "too little text"),
    ("--heads", "tail:9", "the head tail:9 skips nothing"),
    ("--heads", "oracle", "'oracle' is no exit head"),
    ("--heads", "block:1", "'block:1' is no exit head"),
    ("--candidates", "6", "do not fit a model of 6 layers"),
    ("--candidates", "3,2", "rising"),
    ("--router", "dice", "router is 'dice'"),
    ("--minutes", "0", "minutes is 0.0"),
    ("--minutes", "nan", "minutes is nan"),
    ("--minutes", "1e9", "minutes is"),
    ("--confidence", "0.2", "confidence is 0.2; set it between 0.5 and 1"),
    ("--max-disagreement", "0", "max_disagreement is 0.0"),
    ("--window", "4", "window is 4; set it from 16"),
    ("--costs", "nowhere.json", "nowhere.json cannot be read"),
    ("--window", "512", "give at most 128, the model's limit"),
    ("--reference", "fp32", "reference fp32 is the calibrated model itself with weights source"),
    ("--reference", "./nowhere", "there is no directory ./nowhere"),
)


@pytest.mark.parametrize(("option", "value", "message"), UNUSABLE)
def test_unusable_data_and_options_are_errors(
    model: Path, texts: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: str, message: str
) -> None:
    """Unusable data must not be replaced by other text, and must leave no partial output."""
    for name, text in {"one/a": "def f(): pass\n" * 400, **{f"short/{n}": f"{n} = 1\n" * 3 for n in "abc"}}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.txt").write_text(text)
    monkeypatch.chdir(tmp_path)
    done = run(model, "--data", texts, "--out", tmp_path / "calib", *SMALL, option, value)
    assert done.code == 2 and done.err.count("error: ") == 1
    assert message in " ".join(done.err.split())
    assert not (tmp_path / "calib").exists()


def test_help_candidates_and_defaults(run: Run) -> None:
    """The help must do for a first calibration; heads would be trained where no exit can be, or too deep to be worth it."""
    printed = run("--help").out
    for expected in ("--data", "--max-disagreement", "tide-export ./my-model --calibration", "tide-calibrate report"):
        assert expected in printed
    first_two_thirds = {2: [1], 6: [1, 2, 3, 4], 24: [2, 4, 6, 8, 10, 12, 14, 16]}
    assert {layers: candidate_layers("auto", layers) for layers in first_two_thirds} == first_two_thirds
    for layers in (6, 32, 80, 126):
        for spec in ("auto", "every:1", "every:5"):
            candidates = candidate_layers(spec, layers)
            assert candidates == sorted(set(candidates)) and candidates[0] >= 1 and candidates[-1] < layers
    with pytest.raises(ParamsError, match="too few for an exit"):
        candidate_layers("auto", 1)
    assert json.loads(json.dumps(CalibrationConfig().__dict__))["max_disagreement"] == 0.01
