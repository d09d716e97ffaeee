"""The p-value behind the certificate: valid where it can be computed exactly, right at the edges, tight enough to be used."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tide_calibrate.certificate.hoeffding_bentkus import binomial_cdf, fewest_samples, hoeffding_bentkus
from tide_runtime.errors import ParamsError


def exact_cdf(k: int, n: int, p: Fraction) -> float:
    return float(sum(math.comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(k + 1)))


@pytest.mark.parametrize("n", [1, 7, 60, 400])
@pytest.mark.parametrize("p", [Fraction(1, 100), Fraction(1, 20), Fraction(1, 2), Fraction(9, 10)])
def test_binomial_cdf_is_the_sum_of_its_terms(n: int, p: Fraction) -> None:
    """A wrong tail would certify thresholds that break their promise, or refuse good ones."""
    for k in {-1, 0, n // 100, n // 20, n // 2, n - 1, n}:
        assert binomial_cdf(k, n, float(p)) == pytest.approx(exact_cdf(k, n, p), rel=1e-10)


def test_binomial_cdf_of_millions_of_tokens() -> None:
    """Large calibration texts must not lose the tail to cancellation: n = 10⁷ is Poisson(10), P(X <= 10) = 0.58304."""
    assert binomial_cdf(10, 10_000_000, 1e-6) == pytest.approx(0.5830397502, rel=1e-5)
    tail = binomial_cdf(9_000, 1_000_000, 0.01)  # ten standard deviations below the mean
    assert 1e-25 < tail < 1e-23


@pytest.mark.parametrize("n", [40, 299, 1000, 5000])
@pytest.mark.parametrize("epsilon", [0.01, 0.05, 0.3])
def test_rejects_a_true_hypothesis_no_more_often_than_allowed(n: int, epsilon: float) -> None:
    """With a true rate of exactly ε the chance of p <= δ, summed exactly, must stay at δ: the promise itself."""
    for delta in (0.01, 0.05, 0.2):
        rejected = [k for k in range(n + 1) if hoeffding_bentkus(k / n, n, epsilon) <= delta]
        assert binomial_cdf(max(rejected, default=-1), n, epsilon) <= delta


@given(st.integers(1, 3000), st.integers(0, 3000), st.floats(0.001, 0.5))
def test_more_losses_never_look_safer(n: int, k: int, epsilon: float) -> None:
    """The walk from safe to bold thresholds stops at the first failure; a p-value out of order would stop it anywhere."""
    k = min(k, n - 1)
    low, high = hoeffding_bentkus(k / n, n, epsilon), hoeffding_bentkus((k + 1) / n, n, epsilon)
    assert 0 <= low <= high <= 1


@given(st.integers(1, 2000), st.integers(1, 60))
def test_a_count_that_went_through_division_stays_that_count(n: int, k: int) -> None:
    """k / n times n may come out above k; rounding it up to k + 1 would waste text."""
    k, epsilon = min(k, n), 0.5
    if k / n < epsilon:
        assert hoeffding_bentkus(k / n, n, epsilon) <= math.e * binomial_cdf(k, n, epsilon) * (1 + 1e-12)


@pytest.mark.parametrize("epsilon, delta, fewest", [(0.01, 0.05, 299), (0.05, 0.05, 59), (0.01, 0.01, 459)])
def test_fewest_samples_is_where_a_clean_sample_begins_to_do(epsilon: float, delta: float, fewest: int) -> None:
    """The error for too little text names this number; one less must fail and it must do."""
    assert fewest_samples(epsilon, delta) == fewest
    assert hoeffding_bentkus(0.0, fewest, epsilon) <= delta < hoeffding_bentkus(0.0, fewest - 1, epsilon)


def test_a_rate_at_or_above_the_limit_is_no_evidence() -> None:
    assert hoeffding_bentkus(0.05, 10**6, 0.05) == hoeffding_bentkus(1.0, 10, 0.05) == 1.0


@pytest.mark.parametrize("risk, n, epsilon", [(0.1, 0, 0.01), (-0.1, 5, 0.01), (math.nan, 5, 0.01), (0.1, 5, 0.0)])
def test_what_is_no_rate_is_refused(risk: float, n: int, epsilon: float) -> None:
    """A NaN that passed as a p-value would certify."""
    with pytest.raises(ParamsError):
        hoeffding_bentkus(risk, n, epsilon)
