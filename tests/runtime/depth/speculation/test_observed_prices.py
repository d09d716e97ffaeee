"""What passes take while serving decides how many drafts are verified."""

from __future__ import annotations

from typing import Any

import pytest
from runtime.depth.speculation.made_up_speculator import made_up_speculator, made_up_state
from tide_runtime.bundle.calibration import CostTable, ExitInfo, StepCost
from tide_runtime.depth.speculation.record import Guess
from tide_runtime.depth.speculation.speculator import Speculator
from tide_runtime.depth_tuning import DepthTuning

TABLE = CostTable("cpu", "here", 10.0, [StepCost(1, seq, 0.0, 9.0 + seq, 0.0, 0.0, 0.0) for seq in (1, 13)])
EXIT = ExitInfo(1, "identity", "max_probability", 0.5)


def drafted(speculator: Speculator) -> int:
    """Drafts of a text whose last three tokens occurred before."""
    state = made_up_state(speculator)
    state.guess = Guess([5] * 12, range(3, 15), "ngram")
    speculator.place_drafts([state], 0)
    return len(state.drafts)


def serve_expensive_drafts(speculator: Speculator) -> None:
    for _ in range(200):
        for drafts in (0, 3):
            state = made_up_state(speculator)
            for _ in range(drafts):
                state.place(5, "ngram")
            speculator.observe([state], [[5]], 10.0 if not drafts else 13.0 * 4**0.3, None)


def test_fewer_drafts_are_verified_where_they_have_become_expensive() -> None:
    """With outdated prices, verifying drafts takes longer than the tokens they save, and a text is slower than under `full`."""
    speculator = made_up_speculator(TABLE)
    before = drafted(speculator)
    serve_expensive_drafts(speculator)
    assert 0 < drafted(speculator) < before


@pytest.mark.parametrize(
    "changes",
    [
        {"tuning": DepthTuning(clock_rate=0.0)},
        {"exits": (EXIT,)},  # with corrected passes and uncorrected exits, exits would draft too often
        {"follows_clock": False},  # where sums differ, a text must not depend on what else the machine does
        {"passes": None},  # prices are the calibration's then, or guessed
    ],
)
def test_prices_stay_as_they_are(changes: dict[str, Any]) -> None:
    speculator = made_up_speculator(**{"passes": TABLE, **changes})
    serve_expensive_drafts(speculator)
    assert speculator.clock.tilt == 0.0
