"""Empirical risk of policy ``exit`` on traced tokens, for a whole family of threshold vectors at once, and that family.

A token stops at the first checkpoint whose score reaches its threshold. The family is ordered from safest to boldest, so for
every token and checkpoint there is a first member under which the token stops there; these indices determine the behaviour of
every member. The family's parameter is the share of wrong exits that each checkpoint tolerates. The thresholds for it are fitted
on the training split, so that the order in which they are tested on the threshold split is fixed beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.calibration import ExitInfo
from tide_runtime.errors import CalibrationError

from tide_calibrate.traces.trace import ExitTrace, SplitTrace

SAFEST, BOLDEST = 1e-4, 0.5  # tolerated share of wrong exits; an exit that is wrong more often than right is useless


class ExitRule(NamedTuple):
    """An exit: a checkpoint, its head, and the router whose score is compared with the threshold.

    ``mlp_threshold``: router ``mlp+max_probability`` evaluates the head only if the MLP's score reaches this value.
    """

    checkpoint: int
    head: str
    router: str
    mlp_threshold: float | None = None

    @staticmethod
    def from_info(info: ExitInfo) -> ExitRule:
        """The rule of an exit of calibration.json, without its thresholds for the policies."""
        return ExitRule(info.checkpoint, info.head, info.router, info.mlp_threshold)

    def trace(self, trace: SplitTrace) -> ExitTrace:
        """The exit's own trace. Raises CalibrationError when ``trace`` lacks it."""
        if (self.checkpoint, self.head) not in trace.exits:
            known = ", ".join(f"{head} after {checkpoint}" for checkpoint, head in sorted(trace.exits)) or "none"
            raise CalibrationError(f"no trace of the head {self.head} after layer {self.checkpoint}; traced: {known}")
        return trace.exits[self.checkpoint, self.head]

    def scores(self, trace: SplitTrace) -> NDArray[np.float32]:
        """Scores [n] float32; NaN where the token cannot stop. Raises CalibrationError when the trace lacks the router."""
        scores = self.trace(trace).scores
        names = ["mlp", "max_probability"] if self.router == "mlp+max_probability" else [self.router]
        for name in names:
            if name not in scores:
                raise CalibrationError(
                    f"no scores of the router {name} for the head {self.head} after layer {self.checkpoint}; "
                    f"scored: {', '.join(sorted(scores)) or 'none'}"
                )
        if self.router != "mlp+max_probability":
            return scores[self.router]
        if self.mlp_threshold is None:
            raise CalibrationError("the router mlp+max_probability needs an mlp_threshold")
        return np.where(scores["mlp"] >= self.mlp_threshold, scores["max_probability"], np.float32(np.nan))

    def layers(self) -> int:
        """Layers run by a token that stops here: the prefix and the head's own."""
        return self.checkpoint + (int(self.head.partition(":")[2]) if ":" in self.head else 0)


def ordered(exits: Sequence[tuple]) -> tuple[ExitRule, ...]:
    """Sort exits by depth, shallow first. Raises CalibrationError when there is none, or two share a checkpoint."""
    rules = tuple(sorted((ExitRule(*rule) for rule in exits), key=lambda rule: rule.checkpoint))
    checkpoints = [rule.checkpoint for rule in rules]
    if not rules or len(set(checkpoints)) < len(checkpoints):
        raise CalibrationError(f"the exits are after layers {checkpoints}; give at least one, and at most one per checkpoint")
    return rules


@dataclass(frozen=True)
class PolicyCounts:
    """Token counts of every member of a family of M threshold vectors, on G groups of tokens (documents, windows, or tokens).

    Args:
        tokens: [G] int64.
        losses: [G, M] int64, tokens whose likeliest token is not the reference's: at the exit where they stop, or after the
            last layer. Without a reference that is the full model's, so only tokens that stop early can be losses.
        full_losses: [G, M] int64, the losses among tokens that run every layer.
        exits: [G, M] int64, tokens that stop early.
        layers_saved: [G, M] int64, summed over tokens.
        num_layers: L.
    """

    tokens: NDArray[np.int64]
    losses: NDArray[np.int64]
    full_losses: NDArray[np.int64]
    exits: NDArray[np.int64]
    layers_saved: NDArray[np.int64]
    num_layers: int

    def select(self, groups: NDArray, members: slice = slice(None)) -> PolicyCounts:
        """Restrict the counts to some groups, a mask [G] or indices (repeated indices count repeatedly), and some members."""
        return PolicyCounts(
            self.tokens[groups],
            self.losses[:, members][groups],
            self.full_losses[:, members][groups],
            self.exits[:, members][groups],
            self.layers_saved[:, members][groups],
            self.num_layers,
        )

    def rates(self) -> NDArray[np.float64]:
        """Loss rates [G, M], ``losses`` over ``tokens``; every group needs at least one token."""
        return self.losses / self.tokens[:, None]

    def exit_share(self) -> NDArray[np.float64]:
        """Share of all tokens that stop early, [M]."""
        return self.exits.sum(0) / self.tokens.sum()

    def saved_share(self) -> NDArray[np.float64]:
        """Share of all tokens' layers that are skipped, [M]."""
        return self.layers_saved.sum(0) / (self.tokens.sum() * self.num_layers)


def policy_counts(
    trace: SplitTrace, exits: Sequence[ExitRule], thresholds: NDArray[np.float64], groups: NDArray[np.integer]
) -> PolicyCounts:
    """Apply a family of thresholds to a trace.

    Args:
        exits: K exits, shallow first.
        thresholds: [M, K], each column non-increasing.
        groups: [n], the group 0 … G-1 of each token.
    """
    members = len(thresholds)
    count = int(groups.max(initial=-1)) + 1
    losses, stopped, saved = (np.zeros((count, members + 1), np.int64) for _ in range(3))
    stopping = np.full(len(trace.window), members, np.intp)  # the first member under which the token stops early
    for rule, begin, end in _stopping_members(trace, exits, thresholds):
        wrong = ~rule.trace(trace).agrees
        losses += _count_members(groups, begin, end, wrong, losses.shape)
        stopped_here = _count_members(groups, begin, end, begin < end, losses.shape)
        stopped += stopped_here
        saved += stopped_here * (trace.num_layers - rule.layers())
        stopping = np.minimum(stopping, begin)
    full_losses = np.zeros_like(losses)
    if trace.full_agrees is not None:
        full_losses = _count_members(groups, np.zeros_like(stopping), stopping, ~trace.full_agrees, losses.shape)
    tokens = np.bincount(groups, minlength=count).astype(np.int64)
    losses, full_losses, stopped, saved = (counted[:, :-1] for counted in (losses + full_losses, full_losses, stopped, saved))
    return PolicyCounts(tokens, losses, full_losses, stopped, saved, trace.num_layers)


def _stopping_members(
    trace: SplitTrace, exits: Sequence[ExitRule], thresholds: NDArray[np.float64]
) -> Iterator[tuple[ExitRule, NDArray[np.intp], NDArray[np.intp]]]:
    """Yield for each exit the range of members begin <= m < end, [n] each, under which each token stops there."""
    taken = np.full(len(trace.window), len(thresholds), np.intp)  # from this member on, the token stops at a shallower exit
    for rule, column in zip(exits, thresholds.T, strict=True):
        scores = rule.scores(trace).astype(np.float64)
        first = np.searchsorted(-column, -scores, side="left")  # the first member with threshold <= score
        first = np.where(np.isfinite(scores), first, len(thresholds))
        yield rule, first, taken
        taken = np.minimum(taken, first)


def _count_members(
    groups: NDArray[np.integer], begin: NDArray[np.intp], end: NDArray[np.intp], chosen: NDArray[np.bool_], shape: tuple[int, int]
) -> NDArray[np.int64]:
    """Count the chosen tokens of each group with begin <= member < end, [G, M+1], as a cumulative sum of range edges."""
    chosen = chosen & (begin < end)
    offsets = groups[chosen].astype(np.int64) * shape[1]
    size = shape[0] * shape[1]
    change = np.bincount(offsets + begin[chosen], minlength=size) - np.bincount(offsets + end[chosen], minlength=size)
    return change.reshape(shape).cumsum(axis=1)


@dataclass(frozen=True)
class ThresholdFamily:
    """M threshold vectors over K exits.

    Args:
        exits: shallow first.
        wrong: [M], the share of wrong exits that each member tolerates at every checkpoint. The first member tolerates none: it
            never exits.
        thresholds: [M, K] float64, exact in float32 (scores are float32), columns non-increasing; inf where no token exits.
    """

    exits: tuple[ExitRule, ...]
    wrong: NDArray[np.float64]
    thresholds: NDArray[np.float64]


def fit_family(trace: SplitTrace, exits: Sequence[tuple], members: int = 256) -> ThresholdFamily:
    """Fit a family for ``exits`` (checkpoint, head, router[, mlp_threshold]) on ``trace``.

    At each checkpoint the threshold is the lowest score above which at most the tolerated share of tokens disagreed.
    """
    rules = ordered(exits)
    wrong = np.concatenate([[0.0], np.geomspace(SAFEST, BOLDEST, members - 1)])
    columns = [_lowest_scores(rule.scores(trace), rule.trace(trace).agrees, wrong) for rule in rules]
    return ThresholdFamily(rules, wrong, np.stack(columns, axis=1))


def _lowest_scores(scores: NDArray[np.float32], agrees: NDArray[np.bool_], wrong: NDArray[np.float64]) -> NDArray[np.float64]:
    """The lowest score s for each tolerated share, [M], such that at most this share of the tokens of score >= s is wrong."""
    finite = np.isfinite(scores)
    order = np.argsort(-scores[finite], kind="stable")
    ranked = scores[finite][order].astype(np.float64)
    # Laplace smoothing: without it a single right token would count as an error-free region.
    rate = (np.cumsum(~agrees[finite][order]) + 1) / (np.arange(len(ranked)) + 2)
    rate[:-1][ranked[:-1] == ranked[1:]] = math.inf  # equal scores exit together
    lowest_from_here = np.minimum.accumulate(rate[::-1])[::-1]
    last = np.searchsorted(lowest_from_here, wrong, side="right") - 1
    return np.where(last >= 0, ranked[np.maximum(last, 0)], math.inf) if len(ranked) else np.full(len(wrong), math.inf)
