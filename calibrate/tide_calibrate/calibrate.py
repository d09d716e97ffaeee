"""The calibration, phase by phase: load → read → capture → train → trace → costs → place → certify → write."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tide_runtime.calibration import CalibrationInfo, CostTable, ExitInfo

from tide_calibrate.calibration_file import CALIBRATION_NAME, EXITS_NAME, CalibrationFile
from tide_calibrate.capture import capture
from tide_calibrate.capture_store import Capture
from tide_calibrate.certified_exits import CertifiedExits, certify_exits, without_exits
from tide_calibrate.config import CalibrationConfig, candidate_layers
from tide_calibrate.continuations import continue_prompts, generated_tokens
from tide_calibrate.cost_file import load_costs, save_costs
from tide_calibrate.exits_file import write_exits
from tide_calibrate.frozen_model import FrozenModel
from tide_calibrate.head_agreement import agreement_by_depth
from tide_calibrate.measure_model_costs import measure_model_costs
from tide_calibrate.nominal_costs import nominal_costs
from tide_calibrate.placement import Placement, choose_exits, predict
from tide_calibrate.report.data import collect
from tide_calibrate.report.draw import REPORT_NAME, draw_report
from tide_calibrate.split_text import SplitText, read_text
from tide_calibrate.traces import SplitTrace
from tide_calibrate.train_exits import Exit, TrainedExit, captured_layers, exits_to_train, trace_exits, train_exits
from tide_export.bundle_writer import new_directory
from tide_export.load import LoadedModel, fingerprint, load_model
from tide_export.progress import ExportProgress

COSTS_NAME = "costs.json"
_TOOLS = ("tide-llm", "torch", "transformers", "numpy", "safetensors", "matplotlib")
_TEST_WINDOWS = 40  # for the agreement of all heads: 10,240 tokens, a standard error of at most 0.5%
_TRAIN_WINDOWS = 96  # for the order of thresholds


def calibrate(
    source: str,
    data: str,
    out: str | Path,
    config: CalibrationConfig | None = None,
    *,
    costs: str = "measure",
    revision: str | None = None,
    trust_remote_code: bool = False,
    keep_capture: bool = False,
    force: bool = False,
    progress: ExportProgress | None = None,
) -> CalibrationFile:
    """Calibrate the model in directory or hub id ``source`` on the text in ``data``; writes the directory ``out``.

    Args:
        costs: ``measure`` on this machine, ``none``, or a file that an earlier calibration wrote.
        keep_capture: leave ``<out>.work``, the captured states. An interrupted run leaves it too; the next one with the same
            model, text and candidates goes on from there.
        force: replace an existing calibration, and capture anew.

    Raises a child of TideError when model, text, costs or options cannot be used, or ``out`` exists; ``out`` is then as it was.
    """
    config, progress, out = config or CalibrationConfig(), progress or ExportProgress(quiet=True), Path(out)
    given = load_costs(Path(costs)) if costs not in ("measure", "none") else None
    work = out.with_name(f"{out.name}.work")
    with new_directory(out, force, "calibration", CALIBRATION_NAME) as directory:
        if force:
            shutil.rmtree(work, ignore_errors=True)
        with progress.phase(f"load {source}"):
            loaded = load_model(source, config.dtype, revision, trust_remote_code)
        with progress.phase(f"read {data}"):
            text = read_text(data, loaded, config, progress.note)
        learned = _learn(loaded, text, work, config, progress)
        if costs == "measure":
            with progress.phase("measure what steps cost"):
                given = measure_model_costs(loaded, config.dtype, directory)
        file = _decide_and_write(loaded, text, data, learned, given, directory, config, progress)
    if not keep_capture:
        shutil.rmtree(work, ignore_errors=True)
    return file


@dataclass(frozen=True)
class _Learned:
    """Trained exits and what they said.

    ``test``: of the test text; ``own_threshold``, ``own_test``: of the model's continuations of prompts from those splits.
    """

    model: FrozenModel
    capture: Capture
    exits: dict[Exit, TrainedExit]
    test: SplitTrace
    own_threshold: SplitTrace
    own_test: SplitTrace


def _learn(loaded: LoadedModel, text: SplitText, work: Path, config: CalibrationConfig, progress: ExportProgress) -> _Learned:
    model = FrozenModel(loaded.model)
    exits = exits_to_train(candidate_layers(config.candidates, model.num_layers), config.head_kinds, model.num_layers)
    layers = captured_layers(exits, model.num_layers)
    run = partial(capture, hidden_dtype="bfloat16" if config.dtype == "bf16" else "float16", progress=progress)
    with progress.phase(f"capture {text.windows.total_tokens:,} tokens"):
        captured = run(loaded, text.windows, text.split, layers, work / "text")
    with progress.phase(f"let the model continue {config.prompts} prompts"):
        own, prompt_lengths = continue_prompts(loaded.model, text.windows, text.split, config.prompts, config.new_tokens)
        own_captured = run(loaded, own, text.split, layers, work / "continuations")
    with progress.phase(f"train {len(exits)} exits"):
        trained = train_exits(model, captured, exits, config, progress)
    with progress.phase("trace what they say"):
        test = trace_exits(model, captured, "test", trained, _TEST_WINDOWS)
        own_traces = [trace_exits(model, own_captured, split, trained) for split in ("threshold", "test")]
    own_threshold, own_test = (generated_tokens(trace, prompt_lengths) for trace in own_traces)
    return _Learned(model, captured, trained, test, own_threshold, own_test)


def _decide_and_write(
    loaded: LoadedModel,
    text: SplitText,
    data: str,
    learned: _Learned,
    costs: CostTable | None,
    directory: Path,
    config: CalibrationConfig,
    progress: ExportProgress,
) -> CalibrationFile:
    date, info = _now(), text.info(data, config.seed)
    with progress.phase("place the exits"):
        assumed = costs or nominal_costs(loaded.model)
        placed = choose_exits(learned.own_threshold, assumed, config.router)
    with progress.phase("certify their thresholds"):
        certified = _certify(learned, placed.exits, config, info.sha256["threshold"], date)
        predicted = predict(learned.own_test, assumed, certified.exits, placed.draft_limit)
    file = CalibrationFile(
        model=Path(loaded.source).resolve().name if Path(loaded.source).exists() else loaded.source,
        model_fingerprint=fingerprint(loaded),
        num_layers=learned.model.num_layers,
        calibration=_info(certified, predicted, costs),
        refusal=certified.refusal,
        data=info,
        heads=agreement_by_depth(learned.test, learned.own_test),
        config=asdict(config),
        tools={name: version(name) for name in _TOOLS},
        date=date,
    )
    with progress.phase("draw the report"):
        _write(file, learned, certified, directory)
    return file


def _certify(learned: _Learned, exits: list[ExitInfo], config: CalibrationConfig, data_sha256: str, date: str) -> CertifiedExits:
    if not exits:
        return without_exits()
    chosen = {(info.checkpoint, info.head): learned.exits[info.checkpoint, info.head] for info in exits}
    train = trace_exits(learned.model, learned.capture, "train", chosen, _TRAIN_WINDOWS)
    threshold = trace_exits(learned.model, learned.capture, "threshold", chosen)
    return certify_exits(exits, train, threshold, config.max_disagreement, config.confidence, data_sha256, date)


def _info(certified: CertifiedExits, predicted: Placement, costs: CostTable | None) -> CalibrationInfo:
    """Without measured costs no gain is known, so none is predicted or recommended."""
    return CalibrationInfo(
        exits=certified.exits,
        draft_limit=predicted.draft_limit,
        recommended=predicted.recommended if costs is not None else "full",
        predicted={name: round(gain, 4) for name, gain in predicted.predicted.items()} if costs is not None else {},
        certificate=certified.certificate,
        costs=costs,
    )


def _write(file: CalibrationFile, learned: _Learned, certified: CertifiedExits, directory: Path) -> None:
    chosen = {info.checkpoint: (info, learned.exits[info.checkpoint, info.head]) for info in certified.exits}
    heads = {layer: one.head for layer, (_, one) in chosen.items()}
    routers = {layer: one.router for layer, (info, one) in chosen.items() if info.asks_mlp}
    write_exits(directory / EXITS_NAME, heads, routers)
    file.write(directory)
    if file.calibration.costs is not None:
        save_costs(file.calibration.costs, directory / COSTS_NAME)
    report = directory / REPORT_NAME
    report.mkdir()
    data = collect(learned.test, learned.own_test, certified.exits, certified.family)
    data.write(report)
    draw_report(file, data, report)


def _now() -> str:
    """The time, or the one that reproducible builds set (https://reproducible-builds.org/specs/source-date-epoch)."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    moment = datetime.fromtimestamp(int(epoch), UTC) if epoch is not None else datetime.now(UTC)
    return moment.isoformat(timespec="seconds")
