"""What drafts may lose in a sequence."""

from __future__ import annotations

import numpy as np
import pytest
from tide_runtime.depth_tuning import DepthTuning
from tide_runtime.drafting.controller import affordable, lengths_to_verify
from tide_runtime.drafting.ledger import Ledger

TUNING = DepthTuning()


def pass_ms(batch_size: int, tokens: int, longest: int) -> float:
    """Each token more takes 4% of a pass."""
    return 10.0 * (1 + 0.04 * (tokens - batch_size))


@pytest.mark.parametrize("tokens", [5, 12, 40, 200])
@pytest.mark.parametrize("chance", [0.3, 0.9])
def test_drafts_that_are_always_wrong_lose_what_the_ledger_allows(tokens: int, chance: float) -> None:
    """Breaks: a short reply whose copies are likely and all wrong would be slower by a fifth."""
    ledger, spent = Ledger(TUNING), 0.0
    for _ in range(tokens):
        (count,) = lengths_to_verify([affordable(ledger, [chance] * 8, pass_ms, 1)], pass_ms, 1.0, TUNING)
        cost = pass_ms(1, count + 1, count + 1) / 10.0 - 1
        spent += cost
        ledger.settle(1, cost, 0)
    assert 0 < spent <= TUNING.loss_allowance + TUNING.loss_share * tokens + 1e-9


def test_drafts_that_are_right_pay_for_more() -> None:
    """Breaks: a text that repeats would be drafted for in single tokens."""
    ledger = Ledger(TUNING)
    chances = [0.95**n for n in range(1, 9)]
    first = len(affordable(ledger, chances, pass_ms, 1))
    ledger.settle(2, 0.04, 1)
    assert first == 2 and len(affordable(ledger, chances, pass_ms, 1)) == 8


def test_in_a_batch_a_sequence_pays_for_what_all_wait_for() -> None:
    """Breaks: each of eight sequences would lose eight times its own share."""
    ledger = Ledger(TUNING)
    assert len(affordable(ledger, [0.9], pass_ms, 8)) == 0  # eight drafts: 0.32 of a pass
    assert len(affordable(ledger, [0.9], pass_ms, 1)) == 1
    assert np.isclose(ledger.balance, TUNING.loss_allowance)
