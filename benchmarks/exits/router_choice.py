"""What `--router auto` chooses among the kinds of router, and what each kind alone would gain.

Exits, thresholds and draft limit are chosen on some files (split ``threshold``); `exact` is then played on others.
"""

from __future__ import annotations

from dataclasses import dataclass

from tide_calibrate.placement.search import choose_exits
from tide_calibrate.simulation.exact import simulate_exact
from tide_calibrate.traces.trace import SplitTrace
from tide_runtime.bundle.calibration import ROUTERS, CostTable, ExitInfo

AUTO = "auto"


@dataclass(frozen=True)
class RouterChoice:
    """``exits``: the best that were found with routers of one kind, or of all. ``speedup``: predicted, of `exact` that drafts
    with them alone, over the uncut model."""

    exits: list[ExitInfo]
    speedup: float

    @property
    def places(self) -> str:
        return ", ".join(f"{exit.router} after {exit.checkpoint}" for exit in self.exits) or "no exit"


def router_choices(threshold: SplitTrace, test: SplitTrace, costs: CostTable) -> dict[str, RouterChoice]:
    """Kind of router, or ``auto`` → what it comes to."""
    choices = {}
    for kind in (AUTO, *ROUTERS):
        placement = choose_exits(threshold, costs, kind)
        gained = simulate_exact(test, placement.exits, costs, placement.draft_limit).speedup if placement.exits else 1.0
        choices[kind] = RouterChoice(placement.exits, gained)
    return choices
