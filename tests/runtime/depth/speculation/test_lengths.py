"""How many drafts are verified, and what passes are taken to cost."""

from collections.abc import Sequence

import numpy as np
import pytest
from tide_runtime.bundle.calibration import CostTable, StepCost
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.costs.pass_clock import PassClock, PassTime
from tide_runtime.depth.speculation.lengths import choose_lengths
from tide_runtime.depth.tuning import DepthTuning


def row(hit_rate: float, guess: int) -> list[float]:
    """A sequence with so many drafts, each as likely to be right behind right ones."""
    return [hit_rate**n for n in range(1, guess + 1)]


def lengths_of(rows: Sequence[list[float]], pass_ms: PassTime, speedup: float) -> list[int]:
    return choose_lengths(rows, pass_ms, DepthTuning().padding_penalty, speedup).per_sequence


def test_certain_copies_are_taken_from_the_first_on() -> None:
    """All of them are equally likely then; taken from the last, the pass would be costed for other tokens than it has."""
    assert lengths_of([row(1.0, 12)], lambda rows, tokens, seq: 1.0 if tokens <= 5 else 100.0, 1.0) == [4]


def test_a_row_that_does_not_repeat_copies_nothing() -> None:
    """It would pay for its neighbour's repetition."""
    assert lengths_of([row(0.9, 12), row(0.01, 5)], lambda rows, tokens, seq: 1 + 0.3 * tokens, 1.0)[1] == 0


def test_a_step_in_the_cost_is_looked_over() -> None:
    """Steps are rounded up: the first of four such tokens would seem too dear, and copying would stop before it."""
    assert lengths_of([row(1.0, 12)], lambda rows, tokens, seq: 1 + 0.2 * -(-tokens // 4) * 4, 1.0) == [11]


def test_nothing_is_copied_where_exits_give_more() -> None:
    """Copies that are seldom right would take the place of drafts that mostly are."""
    assert lengths_of([row(0.5, 12)], lambda rows, tokens, seq: 1.0, 3.0) == [0]


def flat(rows: int, tokens: int, seq: int) -> float:
    """A pass that costs by its tokens alone."""
    return 1 + 0.1 * tokens


def test_rows_go_ahead_together_where_passes_cost_the_same() -> None:
    """One row would copy far ahead, and the others find nobody left to share a pass with."""
    rows = [row(0.95, 12), *(row(0.9, 12) for _ in range(7))]
    lengths = lengths_of(rows, lambda rows, tokens, seq: 1.0 + 0.02 * tokens, 1.0)
    assert max(lengths) < 12 and max(lengths) - min(lengths) <= 1


def test_few_guesses_are_weighed_against_the_least_pass_that_checks_any() -> None:
    """Guesses that do not pay for any pass would be verified, or those that do would not."""

    def dear(rows: int, tokens: int, seq: int) -> float:
        return 1.0 if tokens == rows else 1.5

    assert lengths_of([row(0.6, 1), row(0.6, 1), row(0.5, 0)], dear, 1.0) == [0, 0, 0]
    assert lengths_of([row(0.99, 1), row(0.99, 1), row(0.5, 0)], dear, 1.0) == [1, 1, 0]


def test_all_rows_copy_where_even_ones_cost_least() -> None:
    """They would be refused for the price of uneven rows, which is passed on the way."""

    def even_is_cheap(rows: int, tokens: int, seq: int) -> float:
        if tokens == rows:
            return 1.0
        return 1.2 if tokens == rows * seq else 1.5

    assert lengths_of([row(0.45, 1)] * 3, even_is_cheap, 1.0) == [1, 1, 1]


TABLE = CostTable("cpu", "made up", 10.0, [StepCost(1, seq, 0.0, 9.5 + 0.5 * seq, 0.0, 0.0, 0.0) for seq in (1, 13)])


@pytest.fixture
def passes() -> PassClock:
    return PassClock(CostModel(None, [0, 8], passes=TABLE), rate=1 / 16, max_tilt=0.3)


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
