"""What passes take while serving decides how many drafts are verified, and not what the ledger counts."""

from __future__ import annotations

import pytest
from tide_runtime.bundle.calibration import CostTable, ExitInfo, StepCost
from tide_runtime.bundle.exits import Exit
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth_tuning import DepthTuning
from tide_runtime.drafting.controller import DraftController, DraftState
from tide_runtime.drafting.text_drafter import TextGuess
from tide_runtime.generation_params import GenerationParams

TABLE = CostTable("cpu", "here", 10.0, [StepCost(1, seq, 0.0, 9.0 + seq, 0.0, 0.0, 0.0) for seq in (1, 13)])
RICH = DepthTuning(loss_allowance=100.0)
EXIT = Exit(ExitInfo(2, "identity", "max_probability", 0.5), 1, None)


def controller(tuning: DepthTuning = RICH, exits: tuple[Exit, ...] = ()) -> DraftController:
    return DraftController(CostModel(None, [0, 2, 4], passes=TABLE), tuning, exits, None, {}, measured=False)


def drafting(control: DraftController) -> DraftState:
    state = control.start(GenerationParams())
    state.guess = TextGuess([5] * 12, matched=3)
    return state


def serve_expensive_drafts(control: DraftController) -> None:
    for _ in range(200):
        control.observe_pass([1], 10.0)
        control.observe_pass([4], 13.0 * 4**0.3)


def test_fewer_drafts_are_verified_where_they_have_become_expensive() -> None:
    """With outdated prices, drafts that cost more than they give make a text slower than `full`."""
    control = controller()
    (before,) = control.text_draft_lengths([drafting(control)], evaluates_exits=False)
    serve_expensive_drafts(control)
    (after,) = control.text_draft_lengths([drafting(control)], evaluates_exits=False)
    assert 0 < after < before


def test_the_ledger_counts_in_measured_prices() -> None:
    control = controller(DepthTuning())
    balances = []
    for _ in range(2):
        state = drafting(control)
        control.settle([state], [3], [2], 0.0)
        balances.append(state.ledger.balance)
        serve_expensive_drafts(control)
    assert balances[0] == balances[1]


@pytest.mark.parametrize(("tuning", "exits"), [(DepthTuning(observe_passes=False), ()), (DepthTuning(), (EXIT,))])
def test_prices_stay_as_measured_where_that_is_wanted_or_exits_compete(tuning: DepthTuning, exits: tuple[Exit, ...]) -> None:
    """With corrected passes and uncorrected exits, a model with exits drafts with them too often."""
    control = controller(tuning, exits)
    serve_expensive_drafts(control)
    assert control.passes.tilt == 0.0
