"""What a caller may set about depth, and what of it cannot be done with a bundle: the errors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import Literal, get_args

from tide_runtime.bundle.manifest import DRAFT, Manifest
from tide_runtime.depth.tuning import DepthTuning
from tide_runtime.errors import ParamsError
from tide_runtime.option import check_choices, option
from tide_runtime.plugins import DRAFTERS, installed, known

Drafters = Literal["all", "router", "ngram", "head", "grammar", "none"]
ExitRule = Literal["threshold", "model"]
_depth = partial(option, rich_help_panel="Depth")


@dataclass(frozen=True)
class DepthOptions:
    """Options of the policies ``exact`` and ``exit``; ``full`` has none.

    Args:
        draft: what ``exact`` drafts with, and ``exit`` where a looped model's loops are rows: ``router`` (early exits, loops),
            ``ngram`` (copies from the text so far and from earlier replies), ``head`` (the draft head), ``grammar`` (tokens that
            a request's grammar forces), ``all`` of them that the bundle has, ``none``, or a drafter of a package by its name.
        max_wait_steps: in a batch, how many steps a row that needs depth waits for others that need it too.
        exit_rule: when ``exit`` stops: ``threshold``, where a router's score reaches the exit's threshold; ``model``, by the rule
            that a looped model was trained with: where its gate's probabilities add up to the model's own threshold, or to
            ``threshold``. No certificate covers the latter.
        tuning: constants that the policies decide with.
    """

    draft: str = _depth("all", "What exact drafts with: router, ngram, head, grammar, all or none.")
    draft_limit: int | None = _depth(None, "Most drafts before a verification. Default: the calibration's.")
    max_wait_steps: int = 2
    threshold: float | None = _depth(None, "Replaces the certified thresholds of exit, 0 to 1; the certificate no longer holds.")
    exit_rule: ExitRule = _depth(
        "threshold",
        "When exit stops: threshold (certified, or --threshold), or model: where the gate of a looped model adds up to "
        "the model's own threshold, or to --threshold (not certified).",
        one_of=get_args(ExitRule),
        kind=str,
    )
    min_depth: int = _depth(0, "exit never stops before this many layers (not certified where that leaves out exits).")
    max_exit_streak: int = _depth(0, "After so many early exits in a row exit takes every layer once; 0: no limit.")
    tuning: DepthTuning = field(default_factory=DepthTuning)

    def __post_init__(self) -> None:
        check_choices(self)
        own = get_args(Drafters)
        if self.draft not in own and self.draft not in installed(DRAFTERS):
            raise ParamsError(f"draft is {self.draft!r}; set it to one of: {known(DRAFTERS, own)}")
        if self.draft_limit is not None and (not _is_int(self.draft_limit) or not 1 <= self.draft_limit <= 64):
            raise ParamsError(f"draft_limit is {self.draft_limit!r}; set it to a number of tokens from 1 to 64")
        if self.threshold is not None and (not isinstance(self.threshold, Real) or not 0.0 <= self.threshold <= 1.0):
            raise ParamsError(
                f"threshold is {self.threshold!r}; set it to a number from 0 (stops at every exit that is evaluated) to 1"
            )
        if self.exit_rule == "model" and self.min_depth:
            raise ParamsError("exit_rule model adds up the gate's probabilities over all loops; leave out min_depth")
        for name in ("max_wait_steps", "min_depth", "max_exit_streak"):
            value = getattr(self, name)
            if not _is_int(value) or value < 0:
                raise ParamsError(f"{name} is {value!r}; set it to an integer >= 0")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)  # a bool is an int to Python, but a mistake here


def gate_threshold(manifest: Manifest, options: DepthOptions) -> float:
    """The cumulated probability at which the model's own rule stops. Raises ParamsError where its gate is not at every loop's
    end."""
    exits = manifest.calibration.exits if manifest.calibration is not None else []
    gates = sum(info.router == "gate" for info in exits)
    loops = manifest.model.loops
    if manifest.model.exit_threshold is None or gates != loops - 1:
        raise ParamsError(
            f"exit_rule model needs the model's own gate at the end of each of its {loops} loops but the last, and this bundle "
            f"has {gates}; export a model that has one (Ouro) without a calibration, or leave out exit_rule"
        )
    return options.threshold if options.threshold is not None else manifest.model.exit_threshold


def with_draft_head_of(manifest: Manifest, target: str, policy: str, options: DepthOptions) -> Manifest:
    """``manifest`` as a policy on ``target`` sees it: without the draft head where the target does not run it.

    Raises ParamsError where nothing else is to draft.
    """
    if DRAFT in manifest.targets[target].graphs:
        return manifest
    if options.draft == "head" and policy in ("exact", "auto"):
        others = [name for name, info in manifest.targets.items() if DRAFT in info.graphs]
        use = f"use target {' or '.join(others)}" if others else "calibrate the model, or export it with --draft-head"
        raise ParamsError(f"draft is head, and the bundle has no draft head for target {target}; {use}, or set draft to all")
    return replace(manifest, draft_head=None)


def too_deep(deepest: int, options: DepthOptions) -> str:
    """Why no exit is left at ``options.min_depth``; ``deepest``: checkpoint of the last one."""
    return f"min_depth is {options.min_depth}, the deepest exit comes after {deepest} layers; set it to at most {deepest}"


def no_exit(manifest: Manifest) -> str:
    """Why there is no exit that may be taken."""
    if manifest.calibration is None:
        return (
            "policy exit needs a calibration, which this bundle has not; make one with "
            "tide-calibrate MODEL --data DATA --out calib/ and export again with --calibration calib/"
        )
    if not manifest.calibration.exits:
        return (
            "policy exit cannot stop anywhere: the calibration found no exit that agrees early enough to pay for its cut; "
            "use policy full or exact"
        )
    return (
        "policy exit has no certified threshold in this bundle; calibrate with a larger --max-disagreement or more data, "
        "set a threshold yourself (threshold=…), or follow the rule of a looped model's own gate (exit_rule model): no "
        "certificate covers either"
    )
