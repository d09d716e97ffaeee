"""The Hoeffding–Bentkus p-value: exact binomial tail, validity under H0, monotonicity, and edge cases; and how many independent
tokens a text is worth."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tide_calibrate.certificate.effective_size import effective_size, student_quantile
from tide_calibrate.certificate.hoeffding_bentkus import binomial_cdf, fewest_samples, hoeffding_bentkus, upper_bound
from tide_runtime.errors import ParamsError


def exact_cdf(k: int, n: int, p: Fraction) -> float:
    return float(sum(math.comb(n, j) * p**j * (1 - p) ** (n - j) for j in range(k + 1)))


def test_binomial_cdf_is_the_sum_of_its_terms() -> None:
    """A wrong tail would certify invalid thresholds, or refuse valid ones; nor may cancellation destroy it for large texts."""
    for n, p in product((1, 7, 60, 400), (Fraction(1, 100), Fraction(1, 20), Fraction(1, 2), Fraction(9, 10))):
        for k in {-1, 0, n // 100, n // 20, n // 2, n - 1, n}:
            assert binomial_cdf(k, n, float(p)) == pytest.approx(exact_cdf(k, n, p), rel=1e-10)
    # n = 10⁷ is Poisson(10), P(X <= 10) = 0.58304.
    assert binomial_cdf(10, 10_000_000, 1e-6) == pytest.approx(0.5830397502, rel=1e-5)
    tail = binomial_cdf(9_000, 1_000_000, 0.01)  # ten standard deviations below the mean
    assert 1e-25 < tail < 1e-23


@pytest.mark.parametrize("n", [40, 299, 1000, 5000])
@pytest.mark.parametrize("epsilon", [0.01, 0.05, 0.3])
def test_rejects_a_true_hypothesis_no_more_often_than_allowed(n: int, epsilon: float) -> None:
    """At a true rate of exactly ε, the exact probability of p <= δ must be at most δ: the definition of a valid p-value."""
    for delta in (0.01, 0.05, 0.2):
        rejected = [k for k in range(n + 1) if hoeffding_bentkus(k / n, n, epsilon) <= delta]
        assert binomial_cdf(max(rejected, default=-1), n, epsilon) <= delta


@given(st.integers(1, 3000), st.integers(0, 3000), st.floats(0.001, 0.5))
def test_the_p_value_is_monotone_in_the_losses(n: int, k: int, epsilon: float) -> None:
    """Fixed-sequence testing stops at the first p-value above δ; a non-monotone p-value would stop it too early."""
    k = min(k, n - 1)
    low, high = hoeffding_bentkus(k / n, n, epsilon), hoeffding_bentkus((k + 1) / n, n, epsilon)
    assert 0 <= low <= high <= 1


@given(st.integers(1, 2000), st.integers(1, 60))
def test_rounding_of_k_over_n_does_not_add_a_loss(n: int, k: int) -> None:
    """In floating point, k / n * n may exceed k; rounding it up to k + 1 would need more text."""
    k, epsilon = min(k, n), 0.5
    if k / n < epsilon:
        assert hoeffding_bentkus(k / n, n, epsilon) <= math.e * binomial_cdf(k, n, epsilon) * (1 + 1e-12)


def test_fewest_samples_is_the_smallest_size_that_certifies() -> None:
    """The error for too little text states this number: it must suffice, and one less must not."""
    for epsilon, delta, fewest in ((0.01, 0.05, 299), (0.05, 0.05, 59), (0.01, 0.01, 459)):
        assert fewest_samples(epsilon, delta) == fewest
        assert hoeffding_bentkus(0.0, fewest, epsilon) <= delta < hoeffding_bentkus(0.0, fewest - 1, epsilon)


def test_no_evidence_and_invalid_rates() -> None:
    """A rate at the limit is no evidence; a NaN must raise an error, as compared with δ it could certify."""
    assert hoeffding_bentkus(0.05, 10**6, 0.05) == hoeffding_bentkus(1.0, 10, 0.05) == 1.0
    for risk, n, epsilon in ((0.1, 0, 0.01), (-0.1, 5, 0.01), (math.nan, 5, 0.01), (0.1, 5, 0.0)):
        with pytest.raises(ParamsError):
            hoeffding_bentkus(risk, n, epsilon)


def test_the_upper_bound_is_the_smallest_rate_that_is_rejected() -> None:
    """The refusal of a quantised model states this bound: a larger --max-disagreement must pass, a smaller one must not."""
    for risk, n in ((0.0, 10), (0.05, 400), (0.05, 100_000), (0.5, 3)):
        bound = upper_bound(risk, n, 0.05)
        assert risk < bound <= 1
        assert hoeffding_bentkus(risk, n, min(bound + 1e-5, 0.999999)) <= 0.05 < hoeffding_bentkus(risk, n, bound - 1e-5)
    assert upper_bound(1.0, 100, 0.05) == 1


def test_student_quantiles_match_published_tables() -> None:
    """A quantile that is too small would overstate the effective size of few documents."""
    for freedom, quantile in ((1, 6.31375), (2, 2.91999), (5, 2.01505), (500, 1.64791), (10**6, 1.64485)):
        assert student_quantile(freedom, 0.95) == pytest.approx(quantile, rel=1e-5)


def test_independent_tokens_count_nearly_in_full() -> None:
    """Text with independent tokens must not need several times the tokens."""
    random = np.random.default_rng(0)
    rates = random.binomial(500, 0.02, (200, 40)) / 500  # 40 columns of 200 documents
    size = effective_size(rates, np.full(200, 500), 0.95)
    assert 0.8 * 100_000 < size.mean() <= 100_000 and size.max() <= 100_000


def test_fully_correlated_documents_count_as_one_token_each() -> None:
    """10⁵ tokens in 50 documents that are entirely right or wrong are 50 observations, not 10⁵; and one document is one."""
    rates = np.zeros((50, 1))
    rates[:10] = 1.0
    assert effective_size(rates, np.full(50, 2000), 0.95).tolist() == [50]
    assert effective_size(np.array([[0.0, 0.5]]), np.array([100_000]), 0.95).tolist() == [1, 1]


def test_a_column_without_losses_has_the_size_of_the_next_column() -> None:
    """Zero losses carry no information on correlation, so 10⁵ tokens must not be assumed independent."""
    rates = np.zeros((20, 4))
    rates[:, 2] = np.linspace(0, 0.02, 20)
    size = effective_size(rates, np.full(20, 5000), 0.95)
    assert size[0] == size[1] == size[2] < 10_000
    assert size[3] == 20  # no later column has variance: one token per document
