"""Thresholds of policy ``exit`` with a guarantee: the rate of changed tokens is at most ε, with confidence 1 - δ.

Learn then Test (Angelopoulos et al. 2021, arXiv:2110.01052) as in CALM (Schuster et al. 2022, arXiv:2207.07061): a family of
threshold vectors, ordered beforehand from safest to boldest, is tested in that order, each with a p-value of H0 "its rate is
above ε". The last one before the first p-value above δ is chosen; fixed-sequence testing keeps the overall level at δ.

A token's loss is 1 where its output is not the reference's likeliest token. By default the reference is the full model; then the
sequence begins without losses. Against another reference, such as the model before its weights were rounded, tokens that run all
layers have losses too, so the sequence begins with a test of the full depth, and nothing is certified where that fails.

Validity does not need a rate that grows along the family. Let H_j be the first true hypothesis of the fixed order. A false
rejection happens only if H_j itself is rejected, because a test that fails ends the sequence; that has probability at most δ. So
losses may fall and rise with depth, as they do against a reference: an exit may agree with it where the last layer does not.

The guarantee is about the rate of a document drawn at random, because tokens of one document are not independent. Assuming
independent tokens (``unit="token"``) is tighter, but its violation rate is several times δ; bench/benchmarks/certificate.py shows
both on real text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from tide_runtime.errors import DataError, ParamsError

from tide_calibrate.certificate.effective_size import effective_size
from tide_calibrate.certificate.hoeffding_bentkus import fewest_samples, hoeffding_bentkus, upper_bound
from tide_calibrate.certificate.risk import ExitRule, PolicyCounts, ThresholdFamily, policy_counts
from tide_calibrate.traces.trace import SplitTrace

Unit = Literal["document", "token"]


@dataclass(frozen=True)
class ThresholdChoice:
    """The chosen thresholds and their figures on the threshold split.

    Args:
        exits: shallow first.
        thresholds: one per exit, None where no token may stop; None altogether when no thresholds satisfy the guarantee.
        reason: why there are no thresholds, and what to do; empty when there are.
        max_disagreement, confidence: ε and 1 - δ.
        unit: the unit assumed to be independent.
        tokens, documents: size of the threshold split.
        effective_tokens: its effective sample size in independent tokens.
        measured: disagreement rate with these thresholds, averaged over documents or tokens.
        full_disagreement: the same if every token runs all layers; 0 unless the trace has another reference.
        exit_share: share of tokens that stop early.
        saved_share: share of all layers not run.
    """

    exits: tuple[ExitRule, ...]
    thresholds: tuple[float | None, ...] | None
    reason: str
    max_disagreement: float
    confidence: float
    unit: Unit
    tokens: int
    documents: int
    effective_tokens: int
    measured: float
    full_disagreement: float
    exit_share: float
    saved_share: float


def choose_thresholds(
    trace: SplitTrace,
    family: ThresholdFamily,
    max_disagreement: float = 0.01,
    confidence: float = 0.95,
    unit: Unit = "document",
) -> ThresholdChoice:
    """Choose the boldest thresholds of ``family`` that are certified on ``trace``, the threshold split.

    The family must be fitted on other documents than the trace's. Raises ParamsError for values out of range, DataError when
    the trace is empty.
    """
    counts = document_counts(trace, family)
    member = certified_member(counts, max_disagreement, confidence, unit)
    return _choice(counts, family, member, max_disagreement, confidence, unit)


def certified_member(counts: PolicyCounts, max_disagreement: float, confidence: float, unit: Unit = "document") -> int:
    """Fixed-sequence testing: the last member before the first p-value above δ; 0, which never exits, when the first fails.

    Members that stop no token have the same losses, those of the full depth, so one of them is tested for all.
    Groups of ``counts`` are the documents. Raises ParamsError for values out of range.
    """
    _check(max_disagreement, confidence, unit)
    risk = disagreement(counts, unit)
    size = independent_tokens(counts, confidence, unit)
    first = int(np.argmax(counts.exits.sum(0) > 0))
    for member in range(max(first - 1, 0), len(risk)):
        if hoeffding_bentkus(float(risk[member]), int(size[member]), max_disagreement) > 1 - confidence:
            return max(member - 1, 0)
    return len(risk) - 1


def naive_member(counts: PolicyCounts, max_disagreement: float, unit: Unit = "document") -> int:
    """The boldest member whose measured rate is at most ε; 0, which never exits, when there is none."""
    return int(np.flatnonzero(disagreement(counts, unit) <= max_disagreement).max(initial=0))


def disagreement(counts: PolicyCounts, unit: Unit = "document") -> NDArray[np.float64]:
    """Disagreement rate with the reference's argmax, [M], averaged over documents or over tokens."""
    return counts.rates().mean(0) if unit == "document" else counts.losses.sum(0) / counts.tokens.sum()


def independent_tokens(counts: PolicyCounts, confidence: float, unit: Unit = "document") -> NDArray[np.int64]:
    """Effective sample size of the text in independent tokens, [M]."""
    if unit == "document":
        return effective_size(counts.rates(), counts.tokens, confidence)
    return np.full(counts.losses.shape[1], counts.tokens.sum(), np.int64)


def document_counts(trace: SplitTrace, family: ThresholdFamily) -> PolicyCounts:
    """Count exits and losses of the family on every document of a trace. Raises DataError when the trace is empty."""
    if not len(trace.document):
        raise DataError("there is no text to choose thresholds on; give more documents, so that each split gets some")
    documents = np.unique(trace.document, return_inverse=True)[1]
    return policy_counts(trace, family.exits, family.thresholds, documents)


def _check(max_disagreement: float, confidence: float, unit: str) -> None:
    if not 0 < max_disagreement < 1 or not 0.5 < confidence < 1:
        raise ParamsError(
            f"max_disagreement is {max_disagreement} and confidence {confidence}; "
            "give a share between 0 and 1, such as 0.01, and a confidence between 0.5 and 1, such as 0.95"
        )
    if unit not in get_args(Unit):
        raise ParamsError(f"unit is {unit!r}; set it to one of: {', '.join(get_args(Unit))}")


def _choice(
    counts: PolicyCounts, family: ThresholdFamily, member: int, epsilon: float, confidence: float, unit: Unit
) -> ThresholdChoice:
    size = independent_tokens(counts, confidence, unit)
    rates = disagreement(counts, unit)
    alone = _full_depth_refusal(float(rates[0]), int(size[0]), epsilon, confidence)
    reason = alone or _refusal(counts, family, member, epsilon, confidence, int(size[np.argmax(counts.exits.sum(0) > 0)]))
    thresholds = tuple(float(t) if math.isfinite(t) else None for t in family.thresholds[member])
    return ThresholdChoice(
        exits=family.exits,
        thresholds=None if reason else thresholds,
        reason=reason,
        max_disagreement=epsilon,
        confidence=confidence,
        unit=unit,
        tokens=int(counts.tokens.sum()),
        documents=len(counts.tokens),
        effective_tokens=int(size[member]),
        measured=float(rates[member]),
        full_disagreement=float(rates[0]),
        exit_share=float(counts.exit_share()[member]),
        saved_share=float(counts.saved_share()[member]),
    )


def _full_depth_refusal(rate: float, size: int, epsilon: float, confidence: float) -> str:
    """Explain why no exit can be certified where full depth differs from the reference at ``rate``; empty where one may be."""
    if not rate or hoeffding_bentkus(rate, size, epsilon) <= 1 - confidence:
        return ""
    bound = upper_bound(rate, size, 1 - confidence)
    documents = ", give more documents (they narrow the bound)" if rate < epsilon else ""
    return (
        f"the quantised model alone disagrees with the reference at {rate:.2%} of tokens (upper bound {bound:.2%} at "
        f"{confidence:.0%} confidence), above --max-disagreement {epsilon:.2%}: take more bits{documents} or allow more"
    )


def _refusal(counts: PolicyCounts, family: ThresholdFamily, member: int, epsilon: float, confidence: float, size: int) -> str:
    """Explain why ``member`` cannot be used as thresholds; empty when it can."""
    stopped = counts.exits.sum(0)
    wrong = (counts.losses - counts.full_losses).sum(0)
    if not np.isfinite(family.thresholds).any() or (stopped[member] and wrong[member] > stopped[member] / 2):
        return (
            "the layers never agree: at no checkpoint do the tokens with the highest scores agree more often than not; "
            "use the policy full, or train exit heads on more text"
        )
    if stopped[member]:
        return ""
    if not stopped.any():
        return "no token of this text stops at any threshold; use the policy full, or calibrate on more text"
    fewest = fewest_samples(epsilon, 1 - confidence)
    tokens = int(counts.tokens.sum())
    if size < fewest:
        wanted = math.ceil(tokens * fewest / max(size, 1))
        return (
            f"too little text: the {tokens} tokens of {len(counts.tokens)} documents tell as much as {size} independent ones, "
            f"but {epsilon:.2%} at {confidence:.0%} confidence needs {fewest}; give about {wanted} tokens, "
            "in more documents, or a larger --max-disagreement"
        )
    first = int(np.argmax(stopped > 0))
    return (
        f"the most confident exits are wrong too often: {stopped[first]} of {tokens} tokens stop at the safest thresholds and "
        f"{wrong[first] / stopped[first]:.1%} of them differ; "
        f"use the policy full, or a larger --max-disagreement than {epsilon:.2%}"
    )
