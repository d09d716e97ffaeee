"""Prices of passes follow what passes take while serving, and not single disturbances."""

from __future__ import annotations

import numpy as np
import pytest
from tide_runtime.bundle.calibration import CostTable, StepCost
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth.speculation.lengths import PassClock
from tide_runtime.depth_tuning import DepthTuning

TABLE = CostTable("cpu", "made up", 10.0, [StepCost(1, seq, 0.0, 9.5 + 0.5 * seq, 0.0, 0.0, 0.0) for seq in (1, 13)])


@pytest.fixture
def passes() -> PassClock:
    return PassClock(CostModel(None, [0, 8], passes=TABLE), DepthTuning())


def serve(passes: PassClock, ms: dict[int, float], steps: int, noise: float = 0.0) -> None:
    random = np.random.default_rng(0)
    for step in range(steps):
        tokens = list(ms)[step % len(ms)]
        passes.observe(1, tokens, tokens, ms[tokens] * (1 + noise * random.standard_normal()))


def test_until_passes_are_observed_the_table_counts(passes: PassClock) -> None:
    assert passes.full(1, 1, 1) == 10.0
    assert passes.full(1, 3, 3) == pytest.approx(11.0)


@pytest.mark.parametrize("speed", [0.5, 3.0])
def test_the_price_of_further_tokens_is_learned_at_any_speed(passes: PassClock, speed: float) -> None:
    """An outdated table, in which further tokens are almost free, verifies drafts that take longer than the tokens they save."""
    table = {tokens: passes.full(1, tokens, tokens) for tokens in (1, 3, 7)}
    serve(passes, {tokens: speed * ms * tokens**0.15 for tokens, ms in table.items()}, 300, noise=0.05)
    assert passes.full(1, 3, 3) == pytest.approx(11.0 * 3**0.15, rel=0.05)
    assert passes.full(1, 1, 1) == 10.0
    serve(passes, {tokens: speed * ms for tokens, ms in table.items()}, 300, noise=0.05)
    assert passes.full(1, 3, 3) == pytest.approx(11.0, rel=0.05)


def test_one_interruption_changes_little(passes: PassClock) -> None:
    serve(passes, {1: 10.0, 3: 11.0}, 100)
    passes.observe(1, 3, 3, 1000.0)
    passes.observe(1, 1, 1, 1000.0)
    assert passes.full(1, 3, 3) == pytest.approx(11.0, rel=0.03)


def test_the_correction_has_bounds_and_a_larger_pass_is_never_cheaper(passes: PassClock) -> None:
    serve(passes, {1: 10.0, 13: 160.0}, 500)
    assert passes.full(1, 13, 13) == pytest.approx(16.0 * 13**0.3)
    serve(passes, {1: 10.0, 2: 1.0}, 500)
    assert passes.full(1, 2, 2) == 10.0


def test_batches_have_a_level_of_their_own(passes: PassClock) -> None:
    """Eight sequences of one token each take another share of their price; that is not what further tokens add."""
    serve(passes, {1: 30.0}, 50)
    for _ in range(50):
        passes.observe(8, 8, 1, passes.full(8, 8, 1))
        passes.observe(8, 16, 2, passes.full(8, 16, 2))
    assert passes.tilt == pytest.approx(0.0)
