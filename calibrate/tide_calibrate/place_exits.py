"""The exits for one bundle: the fastest that share one tail."""

from __future__ import annotations

from dataclasses import replace

from tide_runtime.calibration import CostTable

from tide_calibrate.placement import Placement, choose_exits
from tide_calibrate.traces import SplitTrace


def place_exits(own: SplitTrace, costs: CostTable, router: str) -> Placement:
    """The exits that make ``exact`` fastest on the model's ``own`` continuations, their tails of one length.

    A tail is the bundle's last segment, and there is one of those: each length is tried, and the fastest taken.
    """
    lengths = sorted({head for _, head in own.exits if head.startswith("tail:")}) or [""]
    placed = [choose_exits(_without_other_tails(own, kept), costs, router) for kept in lengths]
    return max(placed, key=lambda placement: placement.predicted.get("exact", 0.0))


def _without_other_tails(trace: SplitTrace, kept: str) -> SplitTrace:
    exits = {key: one for key, one in trace.exits.items() if not key[1].startswith("tail:") or key[1] == kept}
    return replace(trace, exits=exits)
