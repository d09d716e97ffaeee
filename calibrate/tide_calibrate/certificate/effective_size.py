"""How many independent tokens a text is worth: tokens of one document are right and wrong together.

The rate of a few long documents is known far less well than that of as many tokens drawn one by one. How much less shows in
how the documents' rates scatter (design effect: Kish 1965, Survey Sampling, section 8.2).
"""

from __future__ import annotations

import functools
import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray


def effective_size(rates: NDArray[np.float64], tokens: NDArray[np.integer], confidence: float) -> NDArray[np.int64]:
    """The number of independent tokens whose mean would be as uncertain as the mean of the documents' rates.

        n = r (1 - r) / (s² / D · (t / z)²),   at least D, at most what independent tokens would give

    with r and s² the mean and variance of D documents' rates. Student's t in place of the normal quantile z pays for s² being
    an estimate. D is a floor because no variable within 0 … 1 scatters more than one that is 0 or 1. An approximation, good for
    ten documents and usable for four: what few documents do not show, no estimate knows. A column without any variation takes
    the size of the next one that has some; when there is none, nothing speaks for more than D.

    Args:
        rates: [D, M], share of wrong exits among each document's tokens, for M policies from safest to boldest.
        tokens: [D], each at least 1.
        confidence: 1 - δ, of the test that the size is for.

    Returns:
        [M] int64
    """
    documents, members = rates.shape
    if documents < 2:
        return np.full(members, documents, np.int64)
    independent = documents**2 / np.sum(1.0 / tokens)
    mean, variance = rates.mean(0), rates.var(0, ddof=1) / documents
    widening = (student_quantile(documents - 1, confidence) / NormalDist().inv_cdf(confidence)) ** 2
    size = np.full(members, float(documents))
    known = variance > 0
    size[known] = np.clip(mean[known] * (1 - mean[known]) / (variance[known] * widening), documents, independent)
    return size[_next_known(known)].astype(np.int64)


@functools.cache
def student_quantile(freedom: int, probability: float) -> float:
    """The t with P(T <= t) = ``probability`` >= 1/2, for Student's T with ``freedom`` degrees of freedom, to five digits.

    With t = √f · tan θ the density is cosᶠ⁻¹θ, smooth and bounded, so a trapezoid sum integrates it.
    """
    if freedom > 10_000:  # closer to the normal than the sum's own error
        return NormalDist().inv_cdf(probability)
    theta = np.linspace(0.0, math.pi / 2, 100_001)
    density = np.cos(theta) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(float(np.interp(2 * probability - 1, mass / mass[-1], theta)))


def _next_known(known: NDArray[np.bool_]) -> NDArray[np.intp]:
    """For each column the index of the next known one, itself included; its own when none follows."""
    own = np.arange(len(known))
    following = np.minimum.accumulate(np.where(known, own, len(known))[::-1])[::-1]
    return np.where(following < len(known), following, own)
