"""What the policy ``exit`` would have done on captured tokens: where each stops, and whether that was the full model's choice.

A token stops at the first checkpoint whose score reaches its threshold. Threshold vectors come as a family ordered from safest
to boldest, so for every token and checkpoint there is one member from which on it stops there: a few integers per token tell
the whole family's behaviour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tide_runtime.errors import CalibrationError

from tide_calibrate.traces.trace import ExitTrace, SplitTrace


class ExitRule(NamedTuple):
    """Where a token may stop and what is asked: a checkpoint, its head, and the router whose score meets the threshold.

    ``mlp_threshold``: router ``mlp+max_probability`` only asks the head (and stops) when the MLP's score is at least this.
    """

    checkpoint: int
    head: str
    router: str
    mlp_threshold: float | None = None

    def trace(self, trace: SplitTrace) -> ExitTrace:
        """Raises CalibrationError when the trace lacks this exit."""
        if (self.checkpoint, self.head) not in trace.exits:
            known = ", ".join(f"{head} after {checkpoint}" for checkpoint, head in sorted(trace.exits)) or "none"
            raise CalibrationError(f"no trace of the head {self.head} after layer {self.checkpoint}; traced: {known}")
        return trace.exits[self.checkpoint, self.head]

    def scores(self, trace: SplitTrace) -> NDArray[np.float32]:
        """[n] float32; NaN where the token cannot stop. Raises CalibrationError when the trace lacks the router."""
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
        """Layers that a token which stops here runs: the prefix and the head's own."""
        return self.checkpoint + (int(self.head.partition(":")[2]) if ":" in self.head else 0)


def ordered(exits: Sequence[tuple]) -> tuple[ExitRule, ...]:
    """Shallow first. Raises CalibrationError when there is none, or two at one checkpoint."""
    rules = tuple(sorted((ExitRule(*rule) for rule in exits), key=lambda rule: rule.checkpoint))
    checkpoints = [rule.checkpoint for rule in rules]
    if not rules or len(set(checkpoints)) < len(checkpoints):
        raise CalibrationError(f"the exits are after layers {checkpoints}; give at least one, and at most one per checkpoint")
    return rules


@dataclass(frozen=True)
class PolicyCounts:
    """Every member of a family of M threshold vectors on G groups of tokens (documents, windows, or single tokens).

    Args:
        tokens: [G] int64.
        losses: [G, M] int64, tokens whose exit differs from the full model's argmax; a token that goes deep never does.
        exits: [G, M] int64, tokens that stop early.
        layers_saved: [G, M] int64, summed over tokens.
        num_layers: L.
    """

    tokens: NDArray[np.int64]
    losses: NDArray[np.int64]
    exits: NDArray[np.int64]
    layers_saved: NDArray[np.int64]
    num_layers: int

    def select(self, groups: NDArray, members: slice = slice(None)) -> PolicyCounts:
        """Those of some groups, a mask [G] or indices (repeats count again), and of some members."""
        return PolicyCounts(
            self.tokens[groups],
            self.losses[:, members][groups],
            self.exits[:, members][groups],
            self.layers_saved[:, members][groups],
            self.num_layers,
        )

    def rates(self) -> NDArray[np.float64]:
        """[G, M], share of each group's tokens whose exit differs from the full model's argmax; every group needs a token."""
        return self.losses / self.tokens[:, None]

    def exit_share(self) -> NDArray[np.float64]:
        """[M], share of all tokens that stop early."""
        return self.exits.sum(0) / self.tokens.sum()

    def saved_share(self) -> NDArray[np.float64]:
        """[M], share of all tokens' layers that are not run."""
        return self.layers_saved.sum(0) / (self.tokens.sum() * self.num_layers)


def policy_counts(
    trace: SplitTrace, exits: Sequence[ExitRule], thresholds: NDArray[np.float64], groups: NDArray[np.integer]
) -> PolicyCounts:
    """Run a family of thresholds [M, K], each column non-increasing, with K exits, shallow first, on a trace.

    ``groups``: [n], the group 0 … G-1 of each token.
    """
    members, count = len(thresholds), int(groups.max(initial=-1)) + 1
    losses, stopped, saved = (np.zeros((count, members + 1), np.int64) for _ in range(3))
    for rule, begin, end in _stops(trace, exits, thresholds):
        wrong = ~rule.trace(trace).agrees
        losses += _active(groups, begin, end, wrong, losses.shape)
        here = _active(groups, begin, end, begin < end, losses.shape)
        stopped += here
        saved += here * (trace.num_layers - rule.layers())
    tokens = np.bincount(groups, minlength=count).astype(np.int64)
    return PolicyCounts(tokens, losses[:, :-1], stopped[:, :-1], saved[:, :-1], trace.num_layers)


def _stops(
    trace: SplitTrace, exits: Sequence[ExitRule], thresholds: NDArray[np.float64]
) -> Iterator[tuple[ExitRule, NDArray[np.intp], NDArray[np.intp]]]:
    """Per exit, the members begin <= m < end [n] under which each token stops there."""
    taken = np.full(len(trace.window), len(thresholds), np.intp)  # from this member on, the token stops further up
    for rule, column in zip(exits, thresholds.T, strict=True):
        scores = rule.scores(trace).astype(np.float64)
        first = np.searchsorted(-column, -scores, side="left")  # of the members with threshold <= score
        first = np.where(np.isfinite(scores), first, len(thresholds))
        yield rule, first, taken
        taken = np.minimum(taken, first)


def _active(
    groups: NDArray[np.integer], begin: NDArray[np.intp], end: NDArray[np.intp], chosen: NDArray[np.bool_], shape: tuple[int, int]
) -> NDArray[np.int64]:
    """[G, M+1], how many chosen tokens of each group have begin <= member < end."""
    chosen = chosen & (begin < end)
    rows = groups[chosen].astype(np.int64) * shape[1]
    size = shape[0] * shape[1]
    change = np.bincount(rows + begin[chosen], minlength=size) - np.bincount(rows + end[chosen], minlength=size)
    return change.reshape(shape).cumsum(axis=1)
