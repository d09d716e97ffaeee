"""Uncalibrated exits for arms that need a certain behaviour: identity heads at given layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tide_runtime.bundle.calibration import CalibrationInfo, CostTable, ExitInfo
from tide_runtime.bundle.manifest import Manifest

DRAFT_LIMIT = 5


def with_exits(
    manifest: Manifest,
    checkpoints: Sequence[int],
    costs: CostTable | None,
    exact_threshold: float = 0.0,
    exit_threshold: float = 0.0,
    predicted: dict[str, float] | None = None,
    exit_depths: dict[str, float] | None = None,
) -> Manifest:
    """``manifest`` with an identity head at each of ``checkpoints``, evaluated by max-probability; nothing in its bundle changes.

    Args:
        costs: what policies weigh drafting with; None: the runtime's guess.
        exact_threshold, exit_threshold: 0 is always sure.
        predicted, exit_depths: the speedup, and the depths of tokens, that policies are to expect.
    """
    exits = [ExitInfo(c, "identity", "max_probability", exact_threshold, exit_threshold) for c in checkpoints]
    info = CalibrationInfo(exits, DRAFT_LIMIT, "exact", predicted or {}, costs=costs, exit_depths=exit_depths or {})
    return replace(manifest, calibration=info)
