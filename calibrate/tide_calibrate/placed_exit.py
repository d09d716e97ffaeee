"""Choose the exit of a model that was learned, certify its threshold, measure the policies with it, and write the calibration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from tide_runtime.bundle.calibration import CalibrationInfo, CostTable, ExitInfo

from tide_calibrate.capture.reference import ReferenceTokens
from tide_calibrate.certificate.certificate import CertifiedExits, certify_exits, without_exits
from tide_calibrate.config import CalibrationConfig
from tide_calibrate.costs.measure import save_costs
from tide_calibrate.exit_training import write_exits
from tide_calibrate.placement.candidates import EXACT, Candidate, best_candidates
from tide_calibrate.placement.decisions import exit_depths
from tide_calibrate.placement.expected_speed import exact_speedups, exit_speedup
from tide_calibrate.rehearsal import DRAFT_HEAD, WITHOUT_HEAD, Rehearsal, rehearse
from tide_calibrate.report.data import collect
from tide_calibrate.report.draw import REPORT_NAME, draw_report
from tide_calibrate.temporary_bundle import TemporaryBundle
from tide_calibrate.torch_device import model_on
from tide_calibrate.traces.trace import SplitTrace, agreement_by_depth
from tide_calibrate.train import Learned, trace_exits
from tide_export.calibration.calibration_file import EXITS_NAME, CalibrationFile, DataInfo
from tide_export.calibration.exit_calibration import read_exit_calibration
from tide_export.load import fingerprint
from tide_export.progress import ExportProgress
from tide_export.sources.loaded_model import LoadedModel

COSTS_NAME = "costs.json"
HOST = torch.device("cpu")
GATE = 1.02  # smallest speedup for which exits are kept, and another policy than `full` is recommended
WORTH_MEASURING = 0.95  # smallest expected speedup of an exit that is measured; expectations are off by some percent
TIE = 1.08  # measured speeds nearer than this are noise: one bundle, measured twice, ran at 1.57x and 1.68x
CANDIDATE_SECONDS, POLICY_SECONDS = 15.0, 45.0  # seconds of measuring a candidate, and each policy with the chosen exit
_TOOLS = ("tide-llm", "torch", "transformers", "numpy", "safetensors", "matplotlib")
_TRAIN_WINDOWS = 96  # windows of the train split that fix the order in which thresholds are tested


@dataclass(frozen=True)
class LearnedModel:
    """The model with everything that was learned and measured of it, before exits are chosen.

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

    @property
    def deciding_policies(self) -> tuple[str, ...]:
        """Policies by whose speed exits are chosen: the first one that pays decides. In a looped model loops draft for ``exact``,
        so its exits serve ``exit`` alone."""
        return ("exit",) if self.loaded.loops > 1 else (EXACT, "exit")

    def place(self, config: CalibrationConfig, directory: Path, progress: ExportProgress) -> PlacedExit:
        """Choose an exit by its expected speed on one split; keep it only if it pays on the other split, measured or expected."""
        first = self.deciding_policies[0]
        find = partial(
            best_candidates, costs=self.assumed, router=config.router, policy=first, max_disagreement=config.max_disagreement
        )
        with progress.phase("place the exits"):
            learned = self.learned
            candidates = find(learned.own_threshold)
            worthwhile = [self._worth_trying(candidates, policy) for policy in self.deciding_policies]
            if learned.vocabulary is not None and any(worthwhile):
                kinds = [(candidate.info.checkpoint, candidate.info.head) for candidate in candidates]
                learned = learned.on_whole_vocabulary(kinds)  # thresholds must fit the scores of the whole vocabulary
                candidates = find(learned.own_threshold.only(kinds))
        model = replace(self, learned=learned)
        drafting = list[tuple[Candidate, Rehearsal]]()  # measured speeds of `EXACT`
        reason = ""
        for policy in self.deciding_policies:
            tried = model._worth_trying(candidates, policy)
            if not tried:
                continue
            if self.measured is None:
                best = tried[0]
                speed = model.predict([best.info], best.draft_limit, learned.own_test)[policy]
            else:
                with progress.phase(f"measure {policy} with {len(tried)} exits"):
                    speeds = [model._measured_speed(one, policy, config, directory, progress) for one in tried]
                if policy == EXACT:
                    drafting = list(zip(tried, speeds, strict=True))
                best, speed = fastest(tried, [one.speedup for one in speeds])
            if speed >= GATE:
                return PlacedExit(model, best, router_speed=next((one for exit, one in drafting if exit is best), None))
            reason = reason or _refusal(best, policy, speed, "predicted" if self.measured is None else "measured")
        return PlacedExit(model, None, reason or _refusal(candidates[0], first, candidates[0].speedups[first], "predicted"))

    def _worth_trying(self, candidates: Sequence[Candidate], policy: str) -> list[Candidate]:
        """Those that are expected to pay, fastest first; where they are measured, those that are not far from it."""
        min_speedup = GATE if self.measured is None else WORTH_MEASURING
        return sorted((one for one in candidates if one.speedups[policy] >= min_speedup), key=lambda one: -one.speedups[policy])

    def _measured_speed(
        self, candidate: Candidate, policy: str, config: CalibrationConfig, directory: Path, progress: ExportProgress
    ) -> Rehearsal:
        """Speed of ``policy`` with the exit of ``candidate``, in a bundle of its own, written below ``directory``."""
        assert self.measured is not None
        info = CalibrationInfo(
            [candidate.info],
            candidate.draft_limit,
            recommended="exact",
            predicted=candidate.speedups,
            costs=self.costs,
            exit_depths=_rounded(exit_depths(self.learned.own_threshold, [candidate.info])),
        )
        without_head = replace(self.learned, draft_head=None)
        _write(self.file(info, "", config, _now()), without_head, CertifiedExits(info.exits, None, "", None), directory)
        speed = self.rehearse(config, directory, self.measured, [policy], CANDIDATE_SECONDS)[policy]
        progress.note(f"{_name(candidate)}: {policy} runs at {speed.speedup:.2f}x full's speed")
        return speed

    def rehearse(
        self, config: CalibrationConfig, directory: Path, target: str, policies: Sequence[str], seconds: float
    ) -> dict[str, Rehearsal]:
        """Measure ``policies`` with the calibration in ``directory`` on held-out prompts."""
        exported = read_exit_calibration(directory)
        with (
            model_on(self.loaded, HOST),
            TemporaryBundle(self.loaded, config.dtype, [], directory, config.window, exported, target) as bundle,
        ):
            return rehearse(bundle, self.learned.captured.held_out_prompts(), config.new_tokens, policies, seconds)

    def predict(self, exits: Sequence[ExitInfo], draft_limit: int, trace: SplitTrace) -> dict[str, float]:
        """Policy → expected speed over `full`'s on ``trace``. ``exits``: at most one; `exact` drafts with it alone."""
        predicted = {"full": 1.0}
        for info in exits:
            predicted["exact"] = predicted[EXACT] = float(exact_speedups(trace, info, self.assumed)[draft_limit - 1])
            if info.exit_threshold is not None:
                predicted["exit"] = exit_speedup(trace, exits, self.assumed)
        return predicted

    def file(self, info: CalibrationInfo, refusal: str, config: CalibrationConfig, date: str) -> CalibrationFile:
        """The file that carries ``info``. ``refusal``: why nothing is certified; empty when something is."""
        return CalibrationFile(
            model=self.loaded.name,
            model_fingerprint=fingerprint(self.loaded),
            num_layers=self.learned.model.num_layers,
            code=dict(self.loaded.code),
            calibration=info,
            refusal=refusal,
            data=self.data,
            heads=agreement_by_depth(self.learned.test, self.learned.own_test),
            config=asdict(config),
            tools={name: version(name) for name in _TOOLS},
            date=date,
        )


@dataclass(frozen=True)
class PlacedExit:
    """The chosen exit, before the threshold of policy ``exit`` is certified.

    Args:
        candidate: None: no exit pays, for this ``reason``.
        router_speed: measured speed of ``exact`` with drafts from the exit alone; None where it was not measured.
    """

    model: LearnedModel
    candidate: Candidate | None
    reason: str = ""
    router_speed: Rehearsal | None = None

    def certify_and_write(self, config: CalibrationConfig, directory: Path, progress: ExportProgress) -> CalibrationFile:
        """Certify for ``config``, measure the policies where that is possible, and write everything into ``directory``."""
        model = self.model
        date = _now()
        learned = self.model.learned
        with progress.phase(f"certify thresholds for {config.max_disagreement:.2%}"):
            certified = self._certify(config, date)
        file = model.file(self._info(certified), certified.refusal, config, date)
        _write(file, learned, certified, directory)
        if model.measured is not None:
            with progress.phase("measure the policies"):
                file = self._rehearsed(file, config, directory, model.measured, progress)
            if file.calibration.draft_head is None:
                learned = replace(learned, draft_head=None)
            _write(file, learned, certified, directory)
        with progress.phase("draw the report"):
            _draw(file, learned, certified, directory)
        return file

    def _info(self, certified: CertifiedExits) -> CalibrationInfo:
        """Predict and recommend a gain only if costs were measured."""
        model = self.model
        learned = self.model.learned
        exits = certified.exits
        draft_limit = self.candidate.draft_limit if self.candidate is not None else 0
        # Predict on both splits: speed varies more between documents than choosing exits on one of the splits biases it.
        own = learned.own_threshold.joined(learned.own_test)
        predicted = dict[str, float]()
        recommended = "full"
        if model.costs is not None:
            predicted = {name: round(gain, 4) for name, gain in model.predict(exits, draft_limit, own).items()}
            recommended = _recommended(predicted)
        return CalibrationInfo(
            exits=exits,
            draft_limit=draft_limit,
            draft_head=learned.draft_head.info if learned.draft_head is not None else None,
            recommended=recommended,
            predicted=predicted,
            certificate=certified.certificate,
            costs=model.costs,
            exit_depths=_rounded(exit_depths(own, exits)) if certified.certificate is not None else {},
        )

    def _rehearsed(
        self, file: CalibrationFile, config: CalibrationConfig, directory: Path, target: str, progress: ExportProgress
    ) -> CalibrationFile:
        """``file``, which is in ``directory``, with measured speeds in the place of expected ones, and without a draft head that
        does not pay."""
        info = file.calibration
        policies = ["exact", "exit", EXACT] if self.model.loaded.loops > 1 else ["exact", "exit"]
        speeds = self.model.rehearse(config, directory, target, policies, POLICY_SECONDS)
        if self.router_speed is not None:
            speeds[EXACT] = self.router_speed
        bare = speeds.pop(WITHOUT_HEAD, None)
        gain = speeds.pop(DRAFT_HEAD, None)
        left_out = ""
        if bare is not None and gain is not None:
            said = _head_line(speeds["exact"], bare, gain)
            # It stays only where it would pay on other prompts too: what is within the scatter is no reason for another graph.
            if config.draft_head is None and gain.low <= 1.0:
                speeds["exact"], info = bare, replace(info, draft_head=None)
                said = left_out = f"{said}; it is left out (tide-calibrate --draft-head keeps it)"
            progress.note(f"draft head: {said}")
        predicted = info.predicted | {name: speed.speedup for name, speed in speeds.items()}
        ranges = {name: [speed.low, speed.high] for name, speed in speeds.items()}
        info = replace(info, predicted=predicted, predicted_range=ranges, recommended=_recommended(predicted))
        return replace(file, calibration=info, draft_head_left_out=left_out)

    def _certify(self, config: CalibrationConfig, date: str) -> CertifiedExits:
        if self.candidate is None:
            return without_exits(self.reason)
        learned = self.model.learned
        reference = self.model.reference
        info = self.candidate.info
        key = (info.checkpoint, info.head)
        chosen = {key: learned.exits[key]}
        train = trace_exits(learned.model, learned.captured.text, "train", chosen, _TRAIN_WINDOWS)
        threshold = trace_exits(learned.model, learned.captured.threshold(), "threshold", chosen, reference=reference)
        epsilon = config.max_disagreement
        sha256 = self.model.data.sha256["threshold"]
        return certify_exits([info], train, threshold, epsilon, config.confidence, sha256, date, reference)


def fastest(candidates: Sequence[Candidate], speeds: Sequence[float]) -> tuple[Candidate, float]:
    """The first of ``candidates``, in the order of their expected speeds, whose measured speed is not clearly below another's."""
    return next(pair for pair in zip(candidates, speeds, strict=True) if pair[1] * TIE >= max(speeds))


def _refusal(candidate: Candidate, policy: str, speedup: float, source: str) -> str:
    return (
        f"the best exit, {_name(candidate)}, is {source} to give policy {policy} {speedup:.2f}x full's speed, "
        f"and under {GATE:.2f}x no cut pays"
    )


def _name(candidate: Candidate) -> str:
    return f"{candidate.info.head} after layer {candidate.info.checkpoint}"


def _recommended(predicted: Mapping[str, float]) -> str:
    return "exact" if predicted.get("exact", 0.0) >= GATE else "full"


def _rounded(shares: Mapping[int, float]) -> dict[str, float]:
    return {str(layers): round(share, 4) for layers, share in shares.items()}


def _head_line(with_head: Rehearsal, bare: Rehearsal, gain: Rehearsal) -> str:
    return (
        f"exact ran at {with_head.speedup:.3f}x full's speed with it and at {bare.speedup:.3f}x without: it gains "
        f"{gain.speedup - 1:+.1%} ({gain.low - 1:+.1%} to {gain.high - 1:+.1%} on other prompts of the kind)"
    )


def _write(file: CalibrationFile, learned: Learned, certified: CertifiedExits, directory: Path) -> None:
    chosen = {info.checkpoint: (info, learned.exits[info.checkpoint, info.head]) for info in certified.exits}
    heads = {layer: trained.head for layer, (_, trained) in chosen.items()}
    routers = {layer: trained.router_of(info) for layer, (info, trained) in chosen.items() if info.has_mlp or info.router_package}
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
