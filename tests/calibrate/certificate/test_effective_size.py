"""Effective sample size of text whose tokens are correlated within documents."""

import numpy as np
import pytest
from tide_calibrate.certificate.effective_size import effective_size, student_quantile


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
