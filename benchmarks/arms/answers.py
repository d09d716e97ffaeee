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
        low, high: 95% interval of ``measured``.
        other_load: share of the CPU that other processes took meanwhile.
    """

    model: str
    recommended: str
    policy: str
    predicted: float
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
        return 0.0 if self.recommended == "full" else 100 * abs(self.predicted / self.measured - 1)


def add_answers(report: Report, answers: Sequence[Answer], console: Console) -> None:
    """A row for each model, the worst error, how many answers are right, and the load beside them."""
    table = Table(title="the calibrations' answers, speed over the uncut model, one row", title_justify="left")
    for heading in ("model", "recommended", "measured policy", "predicted", "measured (95%)", "predicted / measured", "right"):
        table.add_column(heading)
    for one in answers:
        report.rows.append({**asdict(one), "right": one.right})
        speeds = f"{one.predicted:.2f}", f"{one.measured:.2f} ({one.low:.2f}–{one.high:.2f})"
        ratio = f"{one.predicted / one.measured:.3f}"
        table.add_row(one.model, one.recommended, one.policy, *speeds, ratio, "yes" if one.right else "no")
    console.print(table)
    report.add("other_load_pct", 100 * max(one.other_load for one in answers))
    report.add("worst_prediction_error_pct", max(one.error_pct for one in answers))
    report.add("right_answers", sum(one.right for one in answers))
    report.add("models", len(answers))
