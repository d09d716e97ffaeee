"""Depth policies to hold predictions against: a calibration's answer; `exit` at three thresholds; `exact` by drafter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import typer
from tide_runtime.bundle import Bundle
from tide_runtime.bundle.calibration import CalibrationInfo, ExitInfo
from tide_runtime.depth.exact import ExactDepth
from tide_runtime.depth.options import DepthOptions, Drafters
from tide_runtime.depth.policy import DepthPolicy
from tide_runtime.depth.registry import make_policy

from benchmarks.arms.engine_arm import LoggedEngine

DRAFTERS: tuple[Drafters, ...] = ("all", "ngram", "router")


@dataclass(frozen=True)
class Case:
    """A policy with its options. ``exits``: with the thresholds that it runs with."""

    policy: str
    exits: list[ExitInfo]
    draft: Drafters = "all"


def policy_cases(strict: Path, loose: Path) -> dict[str, Case]:
    """Name → what is compared. ``strict``, ``loose``: bundles with the same exits, certified at a low and a high disagreement."""
    low, high = _exits(strict), _exits(loose)
    middle = [replace(a, exit_threshold=_between(a, b)) for a, b in zip(low, high, strict=True)]
    exits = {"exit_strict": low, "exit_between": middle, "exit_loose": high}
    return {
        "full": Case("full", low),
        **{name: Case("exit", infos) for name, infos in exits.items()},
        **{f"exact_{draft}": Case("exact", low, draft) for draft in DRAFTERS},
    }


def answer_case(calibration: CalibrationInfo) -> tuple[str, Case]:
    """The policy that shows whether the calibration's recommendation is right, and its name among `policy_cases`: the
    recommended one; where that is ``full``, `exact` or `exit`, whichever is predicted to be faster.

    Without exits, `exact` drafts from the text alone. Raises typer.BadParameter for a calibration without predictions.
    """
    names, predicted = {"exact": "exact_all", "exit": "exit_strict"}, calibration.predicted
    policy = max((name for name in names if name in predicted), key=predicted.__getitem__, default=None)
    if policy is None:
        raise typer.BadParameter("the calibration predicts no speed; calibrate without --costs none")
    policy = policy if calibration.recommended == "full" else calibration.recommended
    return names[policy], Case(policy, calibration.exits)


def make_case(case: Case, engine: LoggedEngine) -> DepthPolicy:
    """The case's policy on the engine's bundle, as `Engine` makes it."""
    manifest, backend = engine.manifest, engine.backend
    assert manifest.calibration is not None
    changed = replace(manifest, calibration=replace(manifest.calibration, exits=case.exits))
    policy = make_policy(case.policy, changed, DepthOptions(draft=case.draft), passes=backend.pass_costs)
    if isinstance(policy, ExactDepth):
        policy.keep_within(backend.invariant_tokens, manifest.rounds(engine.engine.target))
    return policy


def _exits(bundle: Path) -> list[ExitInfo]:
    calibration = Bundle.open(bundle).manifest.calibration
    exits = calibration.exits if calibration is not None else []
    if not exits or any(info.exit_threshold is None for info in exits):
        raise typer.BadParameter(f"{bundle} has no exits with certified thresholds; calibrate on more text")
    return exits


def _between(one: ExitInfo, other: ExitInfo) -> float:
    assert one.exit_threshold is not None and other.exit_threshold is not None
    return (one.exit_threshold + other.exit_threshold) / 2
