"""Data of the charts: small arrays, saved as JSON next to the charts so that they can be drawn again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.errors import CalibrationError

from tide_calibrate.certificate.risk import ThresholdFamily
from tide_calibrate.report.curve import CostCurve, OperatingPoint, cost_curve
from tide_calibrate.report.histogram import ExitHistogram, exit_histogram
from tide_calibrate.report.reliability import Reliability, reliability
from tide_calibrate.traces.trace import HeadAgreement, SplitTrace, agreement_by_depth

DATA_NAME = "data.json"
_EXITS_SHOWN = 3  # deepest candidates in the reliability diagram when no exit was chosen


@dataclass(frozen=True)
class ReportData:
    """Data of all charts of one calibration, for a model of ``num_layers`` layers."""

    num_layers: int
    agreement: list[HeadAgreement]
    histograms: list[ExitHistogram]
    reliability: list[Reliability]
    curve: CostCurve

    def write(self, directory: Path) -> None:
        text = json.dumps(asdict(self), indent=1, allow_nan=False)
        (directory / DATA_NAME).write_text(text + "\n", encoding="utf-8")


def collect(
    text: SplitTrace, continuations: SplitTrace | None, exits: Sequence[ExitInfo], family: ThresholdFamily | None
) -> ReportData:
    """Reduce the traces of the test text and of the model's own continuations to the data of the charts.

    ``family``: thresholds of ``exits`` over which the cost curve sweeps; None when there are no exits.
    """
    histograms = []
    if any(info.exit_threshold is not None for info in exits):
        histograms.append(exit_histogram(text, exits, "exit", "held-out text"))
    if exits and continuations is not None:
        histograms.append(exit_histogram(continuations, exits, "exact", "own continuations"))
    if not histograms:  # without exits every token runs every layer
        histograms.append(exit_histogram(text, [], "exit", "held-out text"))
    shown = [(info.checkpoint, info.head) for info in exits] or _deepest(text)
    return ReportData(
        text.num_layers,
        agreement_by_depth(text, continuations),
        histograms,
        reliability(text, shown),
        cost_curve(text, exits, family),
    )


def _deepest(trace: SplitTrace) -> list[tuple[int, str]]:
    head = next(reversed(trace.exits))[1]
    return sorted(key for key in trace.exits if key[1] == head)[-_EXITS_SHOWN:]


def read_data(directory: Path) -> ReportData:
    """Read the data saved in ``directory``. Raises CalibrationError when it is missing or not written by `ReportData.write`."""
    path = directory / DATA_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return ReportData(
            raw["num_layers"],
            [HeadAgreement(**line) for line in raw["agreement"]],
            [ExitHistogram(**histogram) for histogram in raw["histograms"]],
            [Reliability(**line) for line in raw["reliability"]],
            _curve(raw["curve"]),
        )
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read ({error.strerror}); calibrate again with tide-calibrate") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CalibrationError(f"{path} is not report data ({error}); calibrate again with tide-calibrate") from error


def _curve(raw: dict) -> CostCurve:
    chosen = None if raw["chosen"] is None else OperatingPoint(**raw["chosen"])
    lines = {name: [OperatingPoint(**point) for point in raw[name]] for name in ("sweep", "static")}
    return CostCurve(lines["sweep"], chosen, lines["static"], OperatingPoint(**raw["full"]))
