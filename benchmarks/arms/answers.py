"""Whether a calibration's recommendation was right, and how far its prediction was off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table
from tide_bench.report import Report

GAIN = 1.03  # a policy that is measured above this speed should have been recommended


@dataclass(frozen=True)
class Answer:
    """What the calibration of ``model`` recommends, and how ``policy`` did: speeds over the uncut model.

    Args:
        policy: that was measured: the recommended one; where that is ``full``, the best of the others by prediction.
        predicted: by the calibration, on its own continuations and with the step costs that it measured.
        replayed: by the same model on the texts written here, with step costs measured here.
        low, high: 95% interval of ``measured``.
        other_load: share of the CPU that other processes took meanwhile.
    """

    model: str
    recommended: str
    policy: str
    predicted: float
    replayed: float
    measured: float
    low: float
    high: float
    other_load: float

    @property
    def right(self) -> bool:
        return self.measured <= GAIN if self.recommended == "full" else self.measured > 1

    @property
    def error_pct(self) -> float:
        """How far the prediction of the recommended policy is off; `full` is 1 by definition."""
        return self._error_pct(self.predicted)

    @property
    def replay_error_pct(self) -> float:
        """The part of the error that neither other texts nor another moment explains."""
        return self._error_pct(self.replayed)

    def _error_pct(self, speedup: float) -> float:
        return 0.0 if self.recommended == "full" else 100 * abs(speedup / self.measured - 1)


def add_answers(report: Report, answers: Sequence[Answer], console: Console) -> None:
    """A row for each model, the worst error, how many answers are right, and the load beside them."""
    table = Table(title="the calibrations' answers, speed over the uncut model, one row", title_justify="left")
    ratios = "predicted / measured", "replayed / measured"
    for heading in ("model", "recommended", "measured policy", "predicted", "replayed", "measured (95%)", *ratios, "right"):
        table.add_column(heading)
    for one in answers:
        report.rows.append({**asdict(one), "right": one.right})
        speeds = f"{one.predicted:.2f}", f"{one.replayed:.2f}", f"{one.measured:.2f} ({one.low:.2f}–{one.high:.2f})"
        off = [f"{speed / one.measured:.3f}" for speed in (one.predicted, one.replayed)]
        table.add_row(one.model, one.recommended, one.policy, *speeds, *off, "yes" if one.right else "no")
    console.print(table)
    report.add("other_load_pct", 100 * max(one.other_load for one in answers))
    report.add("worst_prediction_error_pct", max(one.error_pct for one in answers))
    report.add("worst_replay_error_pct", max(one.replay_error_pct for one in answers))
    report.add("right_answers", sum(one.right for one in answers))
    report.add("models", len(answers))
