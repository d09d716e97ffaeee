"""How often a way to choose thresholds exceeds its promised rate: choose on some documents, look at the others, many times.

Documents may be synthetic, whose exits disagree more in some documents than in others: then no model is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tide_calibrate.certificate.risk import PolicyCounts
from tide_calibrate.certificate.thresholds import Unit, certified_member, disagreement, naive_member
from tide_calibrate.traces.trace import ExitTrace, SplitTrace

LAYERS = 24
EXITS = [(6, "identity", "max_probability"), (12, "identity", "max_probability")]
Parts = tuple[NDArray[np.intp], NDArray[np.intp]]  # groups to choose on, groups to judge by


@dataclass(frozen=True)
class Arm:
    """A way to choose a member of the family: from counts, at most ε, at confidence 1 - δ; judged by the rate of its ``unit``."""

    title: str
    unit: Unit
    choose: Callable[[PolicyCounts, float, float], int]


ARMS = {
    "ltt": Arm("certified (documents independent)", "document", certified_member),
    "token": Arm("certified (tokens independent)", "token", lambda c, epsilon, sure: certified_member(c, epsilon, sure, "token")),
    "naive": Arm("naive", "document", lambda c, epsilon, _: naive_member(c, epsilon)),
}


@dataclass(frozen=True)
class Outcome:
    """One arm over R repeats.

    Args:
        violations: share of repeats with a rate above ε on the part that judges. Where the safest member, which never exits, is
            all that passes, nothing is certified and nothing can be violated.
        token_weighted: the same, judged by the rate of all tokens together: not what a document's average promises.
        error: binomial standard error of ``violations``.
        risk: mean rate on the part that judges.
        exit_share, saved_share: mean share of tokens that stop early, and of layers not run.
        certified: share of repeats in which some tokens may stop.
    """

    violations: float
    token_weighted: float
    error: float
    risk: float
    exit_share: float
    saved_share: float
    certified: float


def resplits(groups: int, share: float, repeats: int, seed: int) -> Iterator[Parts]:
    """A random ``share`` of the groups, and the rest. The rest should be the larger: its sampling noise inflates violations."""
    random = np.random.default_rng(seed)
    chosen = min(max(2, round(groups * share)), groups - 1)
    for _ in range(repeats):
        order = random.permutation(groups)
        yield order[:chosen], order[chosen:]


def draws(groups: int, size: int, repeats: int, seed: int) -> Iterator[Parts]:
    """``size`` groups drawn with replacement from all, judged by all: what they were drawn from, so the truth is known."""
    random = np.random.default_rng(seed)
    for _ in range(repeats):
        yield random.integers(0, groups, size), np.arange(groups)


def judge(pool: PolicyCounts, arm: Arm, parts: Iterator[Parts], epsilon: float, confidence: float) -> Outcome:
    """Choose on the first part, look at the second, for all ``parts``."""
    rows = []
    for chosen_on, judged_by in parts:
        member = arm.choose(pool.select(chosen_on), epsilon, confidence)
        rest = pool.select(judged_by, slice(member, member + 1))
        risk = disagreement(rest, arm.unit)
        exits = rest.exit_share()
        saved = rest.saved_share()
        above = risk[0] > epsilon
        above_by_tokens = disagreement(rest, "token")[0] > epsilon
        certified = member > 0
        rows.append((certified and above, certified and above_by_tokens, risk[0], exits[0], saved[0], certified))
    violations, by_tokens, *others = (float(mean) for mean in np.mean(np.array(rows, np.float64), axis=0))
    return Outcome(violations, by_tokens, math.sqrt(violations * (1 - violations) / len(rows)), *others)


def synthetic_trace(documents: int, scatter: float, seed: int, tokens: int = 400) -> SplitTrace:
    """``documents`` of ``tokens`` tokens in the median, lengths log-normal.

    A token's score is its chance to agree in a typical document; the document's own level, normal with standard deviation
    ``scatter`` in logits, shifts the chance of all its tokens. With scatter 0 tokens are independent.
    """
    random = np.random.default_rng(seed)
    lengths = np.maximum(20, tokens * np.exp(random.normal(0, 0.7, documents))).astype(np.int64)
    document = np.repeat(np.arange(documents, dtype=np.int32), lengths)
    level = np.repeat(random.normal(0, scatter, documents), lengths)
    ease = random.normal(1.0, 2.0, len(document))
    exits = {}
    for checkpoint, head, router in EXITS:
        score = ease + checkpoint / 6 + random.normal(0, 0.5, len(document))
        agrees = random.random(len(document)) < 1 / (1 + np.exp(-score - level))
        scores = {router: (1 / (1 + np.exp(-score))).astype(np.float32)}
        exits[checkpoint, head] = ExitTrace(checkpoint, head, agrees, np.zeros(len(document), np.float32), scores)
    return SplitTrace(document, document, np.zeros(len(document), np.float32), exits, LAYERS)
