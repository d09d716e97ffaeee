"""The softmax probability of one token, in few calls, against the definition."""

import math

import numpy as np
import pytest
from tide_runtime.depth.executor import max_probability, probability


@pytest.mark.parametrize("shift", [-1e4, -80.0, -30.0, 0.0, 30.0, 80.0, 1e4])
def test_it_is_the_softmax_of_logits_of_any_size(shift: float) -> None:
    logits = (np.random.default_rng(0).normal(0, 3, (5, 700)) + shift).astype(np.float32)
    exact = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    expected = (exact / exact.sum(-1, keepdims=True)).max(-1)
    found = [probability(row, int(row.argmax())) for row in logits]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(max_probability(logits), expected, rtol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_have_none(bad: float) -> None:
    logits = np.zeros(9, np.float32)
    logits[4] = bad
    with np.errstate(invalid="ignore"):
        assert math.isnan(probability(logits, int(logits.argmax())))
        assert math.isnan(probability(logits, -1)), "as a graph on a device says it"


def test_half_precision_is_widened_first() -> None:
    logits = np.array([1.0, 30.0, 29.5], np.float16)
    assert probability(logits, 1) == pytest.approx(1 / (1 + math.exp(-0.5)), rel=1e-5)
