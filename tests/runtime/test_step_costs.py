"""What steps of several rows are taken to cost."""

from __future__ import annotations

import pytest
from tide_runtime.calibration import StepCost
from tide_runtime.step_costs import StepCosts

ROWS, LAYERS, PADDING = 8, 4, 0.5


class MeasuredCosts(StepCosts):
    """Of a model that is not cut, from the ms of a layer by (rows, tokens of each)."""

    def __init__(self, layer_ms: dict[tuple[int, int], float]) -> None:
        rest = {"launch_ms": 0.1, "head_ms": 0.1, "exit_ms": 0.1, "host_ms": 0.1}
        self._steps = [StepCost(rows, seq, layer_ms=ms, **rest) for (rows, seq), ms in layer_ms.items()]
        self._edges, self._padding, self.step = [0, LAYERS], PADDING, self._step


# Of one row many tokens are expensive; of eight rows the last shape was measured in a good moment of the machine.
COSTS = MeasuredCosts({(1, 1): 0.7, (1, 64): 4.0, (ROWS, 1): 1.0, (ROWS, 2): 1.3, (ROWS, 8): 1.9})


@pytest.mark.parametrize("seq", [2, 3, 8])
def test_one_row_that_is_longer_makes_a_step_dearer(seq: int) -> None:
    """Batches copied whatever they could: a step with one long row was taken to be cheaper than one without."""
    plain = COSTS.segments(ROWS, ROWS, 0, 1)
    packed, padded = (COSTS.segments(ROWS, tokens, 0, 1) for tokens in (ROWS - 1 + seq, ROWS * seq))
    assert plain < packed < COSTS.segments(ROWS, ROWS - 1 + seq, 0, 1, seq) < padded


def test_a_draft_that_fills_a_step_up_is_nearly_free() -> None:
    """Uneven steps are padded to what products take at a time; drafts were weighed as if the last cost as much as the first."""
    nine, ten, eleven, twelve = (COSTS.segments(ROWS, tokens, 0, 1, 2) for tokens in (9, 10, 11, 12))
    assert nine == ten < eleven == twelve < COSTS.segments(ROWS, 13, 0, 1, 2)


def test_padding_takes_its_share_of_a_token() -> None:
    """The share that was measured on the machine would be left out of account."""
    packed, padded = (COSTS.step(ROWS, tokens).layer_ms for tokens in (2 * ROWS, 4 * ROWS))
    assert COSTS.step(ROWS, 2 * ROWS, 4).layer_ms == pytest.approx((1 - PADDING) * packed + PADDING * padded)


def test_even_rows_cost_what_was_measured() -> None:
    """Rows that go on together would pay for padding that is not there."""
    assert COSTS.segments(ROWS, 2 * ROWS, 0, 1, 2) == COSTS.segments(ROWS, 2 * ROWS, 0, 1)
