"""The calibration, phase by phase: load → read → (reference) → capture → train → trace → costs → place → certify → write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from tide_runtime.bundle.calibration import CalibrationInfo, CostTable, DraftHeadInfo

from tide_calibrate.capture.reference import ReferenceTokens, capture_reference, check_same_tokens
from tide_calibrate.certificate.certificate import CertifiedExits, certify_exits, without_exits
from tide_calibrate.config import OWN_REFERENCE, CalibrationConfig
from tide_calibrate.costs.measure import load_costs, save_costs
from tide_calibrate.costs.model_costs import measure_model_costs, nominal_costs
from tide_calibrate.exit_training import write_exits
from tide_calibrate.measured_target import CPU, measured_target
from tide_calibrate.placement.search import GATE, Placement, choose_exits, gate_exits, predict
from tide_calibrate.rehearsal import DRAFT_HEAD, WITHOUT_HEAD, Rehearsal, rehearse
from tide_calibrate.report.data import collect
from tide_calibrate.report.draw import REPORT_NAME, draw_report
from tide_calibrate.temporary_bundle import TemporaryBundle
from tide_calibrate.text.documents import SplitText, read_text
from tide_calibrate.torch_device import checked_device, model_on
from tide_calibrate.traces.trace import agreement_by_depth
from tide_calibrate.train import Learned, capture_bundle, learn, trace_exits
from tide_export.bundle_writer import new_directory
from tide_export.calibration.calibration_file import CALIBRATION_NAME, EXITS_NAME, CalibrationFile, DataInfo
from tide_export.calibration.exit_calibration import check_can_exit, read_exit_calibration
from tide_export.export import quantize_loaded
from tide_export.load import LoadedModel, fingerprint, load_model
from tide_export.progress import ExportProgress
from tide_export.targets.choice import AUTO

COSTS_NAME = "costs.json"
HOST = torch.device("cpu")
_TOOLS = ("tide-llm", "torch", "transformers", "numpy", "safetensors", "matplotlib")
_TRAIN_WINDOWS = 96  # windows of the train split that fix the order in which thresholds are tested


def calibrate(
    source: str,
    data: str,
    out: str | Path,
    config: CalibrationConfig | None = None,
    *,
    also: Mapping[float, str | Path] | None = None,
    costs: str = "measure",
    target: str = AUTO,
    revision: str | None = None,
    trust_remote_code: bool = False,
    tokenizer: str | None = None,
    keep_capture: bool = False,
    force: bool = False,
    progress: ExportProgress | None = None,
) -> CalibrationFile:
    """Calibrate the model in directory, hub id or GGUF file ``source`` on the text in ``data`` and write the directory ``out``.

    Args:
        also: further ε → directory; these calibrations differ only in their certified thresholds.
        costs: ``measure`` on this machine, ``none``, or a file that an earlier calibration wrote.
        target: the target that is measured; ``auto``: see `measured_target`.
        tokenizer: the tokenizer in place of the model's own; see `tide_export.source_tokenizer`.
        keep_capture: keep ``<out>.work``, the captured states. An interrupted run keeps it too, and the next run with the same
            model, text and candidates resumes from it.
        force: replace an existing calibration, and capture anew.

    Raises a child of TideError when model, text, costs, target or options cannot be used, or ``out`` exists; ``out`` is then
    unchanged.
    """
    config, progress = config or CalibrationConfig(), progress or ExportProgress(quiet=True)
    out, also = Path(out), also or {}
    configs = [config, *(replace(config, max_disagreement=epsilon) for epsilon in also)]
    device = checked_device(config.device)
    cost_table = load_costs(Path(costs)) if costs not in ("measure", "none") else None
    work = out.with_name(f"{out.name}.work")
    with ExitStack() as stack:
        staged = (new_directory(path, force, "calibration", CALIBRATION_NAME) for path in [out, *map(Path, also.values())])
        directories = [stack.enter_context(directory) for directory in staged]
        if force:
            shutil.rmtree(work, ignore_errors=True)
        load = partial(load_model, source, config.dtype, revision, trust_remote_code, config.weights, tokenizer)
        with progress.phase(f"load {source}"):
            loaded = load()
        check_can_exit(loaded)
        on_gpu = device.type == "cuda"
        measured = measured_target(config.dtype, target, loaded.mixed_layers, on_gpu) if costs == "measure" else None
        with progress.phase(f"read {data}"):
            text = read_text(data, loaded, config, progress.note)
        reference = None
        if config.reference == OWN_REFERENCE and config.dtype == "fp32":  # as loaded, the model is the original
            reference = _reference_tokens(loaded, text, work, device, progress)
        elif config.reference:
            used = loaded.tokenizer
            del loaded  # one model in memory at a time
            is_own = config.reference == OWN_REFERENCE
            original_source = source if is_own else config.reference
            with progress.phase(f"load the reference {original_source}"):
                loaded = load_model(original_source, "fp32", revision if is_own else None, trust_remote_code, tokenizer=tokenizer)
            check_same_tokens(loaded, source, used, text.windows)
            reference = _reference_tokens(loaded, text, work, device, progress)
            del loaded
            with progress.phase(f"load {source}"):
                loaded = load()
        loaded = quantize_loaded(loaded, config.weights, config.quantizer, progress, data)
        stack.enter_context(model_on(loaded, device))
        shared = measured == CPU and not loaded.quantized  # step costs are those of low-bit products, which do not capture
        with capture_bundle(loaded, text, config, directories[0], shared) as bundle:
            learned = learn(loaded, text, work, config, progress, bundle)
            if measured is not None:
                with progress.phase(f"measure step costs of {measured}"), model_on(loaded, HOST):  # where the exporter reads it
                    own = bundle if shared else None
                    cost_table = measure_model_costs(loaded, config.dtype, directories[0], measured, own)
            info = text.info(data, config.seed)
            placed = _Placed.place(loaded, info, learned, reference, cost_table, measured, config, progress)
            files = [placed.certify_and_write(*pair, progress) for pair in zip(configs, directories, strict=True)]
    if not keep_capture:
        shutil.rmtree(work, ignore_errors=True)
    return files[0]


def _reference_tokens(
    original: LoadedModel, text: SplitText, work: Path, device: torch.device, progress: ExportProgress
) -> ReferenceTokens:
    with progress.phase("run the reference"), model_on(original, device):
        windows = text.windows_of({"threshold": None})  # as they are captured, so that both number them alike
        return capture_reference(original, windows, text.split, "threshold", work / "reference", progress)


@dataclass(frozen=True)
class _Placed:
    """The chosen exits, before the thresholds of policy ``exit`` are certified.

    Args:
        reference: the tokens to certify agreement with; None: the model's own.
        costs: the measured cost table; None when nothing was measured and ``assumed`` is nominal.
        measured: the target that ``costs`` were measured on here, so policies are measured on it too; None: they were not.
    """

    loaded: LoadedModel
    data: DataInfo
    learned: Learned
    reference: ReferenceTokens | None
    costs: CostTable | None
    measured: str | None
    assumed: CostTable
    placement: Placement

    @staticmethod
    def place(
        loaded: LoadedModel,
        data: DataInfo,
        learned: Learned,
        reference: ReferenceTokens | None,
        costs: CostTable | None,
        measured: str | None,
        config: CalibrationConfig,
        progress: ExportProgress,
    ) -> _Placed:
        """Choose exits on one split and keep them only if they also pay on the other split."""
        assumed = costs or nominal_costs(loaded)
        with progress.phase("place the exits"):
            choose = partial(choose_exits, costs=assumed, router=config.router, max_disagreement=config.max_disagreement)
            chosen = choose(learned.own_threshold)
            if chosen.exits and learned.vocabulary is not None:  # thresholds must fit the scores of the whole vocabulary
                shortlist = [(info.checkpoint, info.head) for info in chosen.exits]
                learned = learned.on_whole_vocabulary(shortlist)
                chosen = choose(learned.own_threshold.only(shortlist))
            if chosen.exits:
                chosen = gate_exits(learned.own_test, assumed, chosen.exits, chosen.draft_limit)
        return _Placed(loaded, data, learned, reference, costs, measured, assumed, chosen)

    def certify_and_write(self, config: CalibrationConfig, directory: Path, progress: ExportProgress) -> CalibrationFile:
        date, learned = _now(), self.learned
        with progress.phase(f"certify thresholds for {config.max_disagreement:.2%}"):
            certified = self._certify(config, date)
            # Predict on both splits: speed varies more between documents than choosing exits on one of the splits biases it.
            own = learned.own_threshold.joined(learned.own_test)
            predicted = predict(own, self.assumed, certified.exits, self.placement.draft_limit)
        file = CalibrationFile(
            model=self.loaded.name,
            model_fingerprint=fingerprint(self.loaded),
            num_layers=learned.model.num_layers,
            code=dict(self.loaded.code),
            calibration=_info(
                certified, predicted, self.costs, learned.draft_head.info if learned.draft_head is not None else None
            ),
            refusal=certified.refusal,
            data=self.data,
            heads=agreement_by_depth(learned.test, learned.own_test),
            config=asdict(config),
            tools={name: version(name) for name in _TOOLS},
            date=date,
        )
        _write(file, learned, certified, directory)
        if self.measured is not None:
            with progress.phase("measure the policies"):
                file = self._rehearsed(file, config, directory, self.measured, progress)
            if file.calibration.draft_head is None:
                learned = replace(learned, draft_head=None)
            _write(file, learned, certified, directory)
        with progress.phase("draw the report"):
            _draw(file, learned, certified, directory)
        return file

    def _rehearsed(
        self, file: CalibrationFile, config: CalibrationConfig, directory: Path, target: str, progress: ExportProgress
    ) -> CalibrationFile:
        """``file``, which is in ``directory``, with measured speeds in the place of simulated ones, and without a draft head that
        does not pay."""
        captured, info = self.learned.captured, file.calibration
        prompts = captured.held_out_prompts()
        exported = read_exit_calibration(directory)
        with (
            model_on(self.loaded, HOST),
            TemporaryBundle(self.loaded, config.dtype, [], directory, config.window, exported, target) as bundle,
        ):
            found = rehearse(bundle, prompts, config.new_tokens)
        bare, gain, left_out = found.pop(WITHOUT_HEAD, None), found.pop(DRAFT_HEAD, None), ""
        if bare is not None and gain is not None:
            said = _head_line(found["exact"], bare, gain)
            # It stays only where it would pay on other prompts too: what is within the scatter is no reason for another graph.
            if config.draft_head is None and gain.low <= 1.0:
                found["exact"], info = bare, replace(info, draft_head=None)
                said = left_out = f"{said}; it is left out (tide-calibrate --draft-head keeps it)"
            progress.note(f"draft head: {said}")
        predicted = info.predicted | {name: one.speedup for name, one in found.items()}
        recommended = "exact" if predicted.get("exact", 0.0) >= GATE else "full"
        ranges = {name: [one.low, one.high] for name, one in found.items()}
        info = replace(info, predicted=predicted, predicted_range=ranges, recommended=recommended)
        return replace(file, calibration=info, draft_head_left_out=left_out)

    def _certify(self, config: CalibrationConfig, date: str) -> CertifiedExits:
        learned, exits = self.learned, self.placement.exits
        if not exits:
            return without_exits(self.placement.reason)
        chosen = {(info.checkpoint, info.head): learned.exits[info.checkpoint, info.head] for info in exits}
        train = trace_exits(learned.model, learned.captured.text, "train", chosen, _TRAIN_WINDOWS)
        threshold = trace_exits(learned.model, learned.captured.threshold(), "threshold", chosen, reference=self.reference)
        epsilon, sha256 = config.max_disagreement, self.data.sha256["threshold"]
        return certify_exits(exits, train, threshold, epsilon, config.confidence, sha256, date, self.reference)


def _info(
    certified: CertifiedExits, predicted: Placement, costs: CostTable | None, draft_head: DraftHeadInfo | None
) -> CalibrationInfo:
    """Predict and recommend a gain only if costs were measured."""
    exit_policy = predicted.simulations.get("exit")
    return CalibrationInfo(
        exits=certified.exits,
        draft_limit=predicted.draft_limit,
        draft_head=draft_head,
        recommended=predicted.recommended if costs is not None else "full",
        predicted={name: round(gain, 4) for name, gain in predicted.predicted.items()} if costs is not None else {},
        certificate=certified.certificate,
        costs=costs,
        exit_depths={str(layers): round(share, 4) for layers, share in exit_policy.stops.items()} if exit_policy else {},
    )


def _head_line(with_head: Rehearsal, bare: Rehearsal, gain: Rehearsal) -> str:
    return (
        f"exact ran at {with_head.speedup:.3f}x full's speed with it and at {bare.speedup:.3f}x without: it gains "
        f"{gain.speedup - 1:+.1%} ({gain.low - 1:+.1%} to {gain.high - 1:+.1%} on other prompts of the kind)"
    )


def _write(file: CalibrationFile, learned: Learned, certified: CertifiedExits, directory: Path) -> None:
    chosen = {info.checkpoint: (info, learned.exits[info.checkpoint, info.head]) for info in certified.exits}
    heads = {layer: trained.head for layer, (_, trained) in chosen.items()}
    routers = {layer: trained.router_of(info) for layer, (info, trained) in chosen.items() if info.has_mlp}
    write_exits(directory / EXITS_NAME, heads, routers, learned.draft_head.head if learned.draft_head is not None else None)
    file.write(directory)
    if file.calibration.costs is not None:
        save_costs(file.calibration.costs, directory / COSTS_NAME)


def _draw(file: CalibrationFile, learned: Learned, certified: CertifiedExits, directory: Path) -> None:
    report = directory / REPORT_NAME
    report.mkdir()
    data = collect(learned.test, learned.own_test, certified.exits, certified.family)
    data.write(report)
    draw_report(file, data, report)


def _now() -> str:
    """Current time, or SOURCE_DATE_EPOCH when set (https://reproducible-builds.org/specs/source-date-epoch)."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    moment = datetime.fromtimestamp(int(epoch), UTC) if epoch is not None else datetime.now(UTC)
    return moment.isoformat(timespec="seconds")
