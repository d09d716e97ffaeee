"""Effective sample size of a text whose tokens are correlated within documents (cluster sampling).

A rate estimated from a few long documents is less certain than one from the same number of independent tokens. The variance of
the rates between documents tells how much less (design effect: Kish 1965, Survey Sampling, section 8.2).
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray


def effective_size(rates: NDArray[np.float64], tokens: NDArray[np.integer], confidence: float) -> NDArray[np.int64]:
    """The number of independent tokens whose mean has the same uncertainty as the mean of the documents' rates.

        n = r (1 - r) / (s² / D · (t / z)²),   at least D, at most the value for independent tokens

    with r and s² the mean and variance of D documents' rates. Student's t instead of the normal quantile z accounts for s² being
    an estimate. D is a lower bound because a variable in [0, 1] has the largest variance when it is Bernoulli. The approximation
    is good for ten documents and usable for four. A column without variance takes the size of the next column that has some, or
    D when there is none.

    Args:
        rates: [D, M], share of wrong exits among each document's tokens, for M policies from safest to boldest.
        tokens: [D], each at least 1.
        confidence: 1 - δ of the test that uses the size.

    Returns:
        [M] int64
    """
    documents, members = rates.shape
    if documents < 2:
        return np.full(members, documents, np.int64)
    independent = documents**2 / np.sum(1.0 / tokens)
    mean = rates.mean(0)
    variance = rates.var(0, ddof=1) / documents
    widening = (student_quantile(documents - 1, confidence) / NormalDist().inv_cdf(confidence)) ** 2
    size = np.full(members, float(documents))
    known = variance > 0
    size[known] = np.clip(mean[known] * (1 - mean[known]) / (variance[known] * widening), documents, independent)
    return size[_next_known(known)].astype(np.int64)


@functools.cache
def student_quantile(freedom: int, probability: float) -> float:
    """Quantile t with P(T <= t) = ``probability`` >= 1/2 of Student's T with ``freedom`` degrees of freedom, to five digits.

    Substituting t = √f · tan θ gives the density cosᶠ⁻¹θ, smooth and bounded, which the trapezoidal rule integrates.
    """
    if freedom > 10_000:  # the difference from the normal is below the integration error
        return NormalDist().inv_cdf(probability)
    theta = np.linspace(0.0, math.pi / 2, 100_001)
    density = np.cos(theta) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(2 * probability - 1, mass / mass[-1], theta)))


def _next_known(known: NDArray[np.bool_]) -> NDArray[np.intp]:
    """The index of the first known column at or after each column; the column's own index when none follows."""
    own = np.arange(len(known))
    following = np.minimum.accumulate(np.where(known, own, len(known))[::-1])[::-1]
    return np.where(following < len(known), following, own)
