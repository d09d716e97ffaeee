"""Hoeffding–Bentkus p-value: evidence that an expected loss is at most ε.

The p-value is the smaller of two bounds on the probability that the mean of n losses is this low although its expectation
exceeds ε: Hoeffding's in relative-entropy form, tighter far from ε, and Bentkus's, tighter near ε.
"""

from __future__ import annotations

import math

import numpy as np
from tide_runtime.errors import ParamsError


def hoeffding_bentkus(risk: float, n: int, epsilon: float) -> float:
    """The p-value of H0 "expected loss > ``epsilon``", given the mean ``risk`` of ``n`` independent losses in [0, 1].

    Under H0 it is at most δ with probability at most δ, for any distribution of the losses
    (Bates et al. 2021, arXiv:2101.02703, section 3.1; Learn then Test, Angelopoulos et al. 2021, arXiv:2110.01052).

        p = min(exp(-n · kl(min(risk, ε), ε)),  e · P(Binomial(n, ε) <= ⌈n · risk⌉))

    Raises ParamsError for values outside their ranges.
    """
    if not 0 < epsilon < 1:
        raise ParamsError(f"epsilon is {epsilon}; a rate strictly between 0 and 1 can be tested")
    if n < 1 or not 0 <= risk <= 1:
        raise ParamsError(f"the mean of {n} losses is {risk}; give at least one loss, each between 0 and 1")
    if risk >= epsilon:
        return 1.0
    hoeffding = math.exp(-n * _relative_entropy(risk, epsilon))
    # risk is often k / n in floating point, and n * risk may round to just above the integer k
    bentkus = math.e * binomial_cdf(math.ceil(n * risk - 1e-6), n, epsilon)
    return min(1.0, hoeffding, bentkus)


def upper_bound(risk: float, n: int, delta: float) -> float:
    """The smallest rate ε that the mean ``risk`` of ``n`` losses rejects at level δ, to six digits; 1 where it rejects none.

    The expected loss is at most this with probability at least 1 - δ: tests inverted to a confidence bound.
    """
    low = risk
    high = 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if hoeffding_bentkus(risk, n, middle) <= delta else (middle, high)
    return high


def binomial_cdf(k: int, n: int, p: float) -> float:
    """Compute P(Binomial(n, p) <= k) to about nine digits, for n up to millions.

    The largest term is computed with log-gamma and the others by their ratios, from the mode outwards, so nothing cancels.
    """
    if k < 0:
        return 0.0
    if k >= n:
        return 1.0
    if k > n * p:  # the smaller tail is the accurate one
        return 1.0 - binomial_cdf(n - k - 1, n, 1.0 - p)
    log_term = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * math.log(p) + (n - k) * math.log1p(-p)
    j = np.arange(k, 0, -1, dtype=np.float64)
    ratios = j / (n - j + 1) * ((1 - p) / p)  # P(j - 1) / P(j), below 1 left of the mode
    return min(1.0, math.exp(log_term) * (1.0 + float(np.cumprod(ratios).sum())))


def fewest_samples(epsilon: float, delta: float) -> int:
    """The smallest n at which a sample without losses rejects H0 "rate > ``epsilon``" at level δ: (1 - ε)ⁿ <= δ."""
    return math.ceil(math.log(delta) / math.log1p(-epsilon))


def _relative_entropy(a: float, b: float) -> float:
    """KL divergence of Bernoulli(a) from Bernoulli(b) in nats, with 0 · log 0 = 0."""
    return (a * math.log(a / b) if a > 0 else 0.0) + ((1 - a) * math.log((1 - a) / (1 - b)) if a < 1 else 0.0)
