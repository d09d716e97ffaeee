"""When a gamble is given up, and for how long."""

from __future__ import annotations

from tide_runtime.drafting.backoff import Trial

IN_VAIN, A_WIN = (1.0, 1.5), (3.0, 1.5)  # tokens, cost


def rests(trial: Trial, tries: list[tuple[float, float]]) -> list[float]:
    """The rests that ``tries`` lead to; whoever rests, rests to the end."""
    found = []
    for tokens, cost in tries:
        trial.saw(tokens, cost)
        if not trial.asks:
            found.append(trial.resting)
            trial.rest(trial.resting)
    return found


def test_rests_grow_while_nothing_is_won() -> None:
    """Hopeless text would be asked for ever; a try in vain costs up to half a step."""
    assert rests(Trial(1.0), [IN_VAIN] * 4) == [32, 128, 512, 512]


def test_who_has_won_is_asked_again_sooner() -> None:
    """A text whose easy parts come late would be given up for good."""
    trial = Trial(1.0)
    assert rests(trial, [IN_VAIN, A_WIN]) == [32]
    assert rests(trial, [IN_VAIN] * 9)[:2] == [32, 64]


def test_what_pays_goes_on() -> None:
    """One miss among wins would end it."""
    assert rests(Trial(1.0), [A_WIN, A_WIN, IN_VAIN, A_WIN, IN_VAIN, A_WIN]) == []
