"""When speculation is given up, and for how long."""

from __future__ import annotations

from tide_runtime.depth.speculation.record import Backoff
from tide_runtime.depth_tuning import DepthTuning

LOSS, GAIN = (1.0, 1.5), (3.0, 1.5)  # tokens, cost


def backoff() -> Backoff:
    return Backoff(DepthTuning(), expected=1.0)


def cooldowns(record: Backoff, outcomes: list[tuple[float, float]]) -> list[float]:
    """The cooldowns that ``outcomes`` lead to; each one is waited for."""
    found = []
    for tokens, cost in outcomes:
        record.observe(tokens, cost)
        if not record.active:
            found.append(record.cooldown)
            record.pass_tokens(record.cooldown)
    return found


def test_cooldowns_grow_while_speculation_loses() -> None:
    """Guards against endless retries on hopeless text; each costs up to half a step."""
    assert cooldowns(backoff(), [LOSS] * 6) == [32, 64, 128, 256, 512, 1024]


def test_a_clear_gain_resets_the_next_cooldown() -> None:
    """Guards against giving up for good on a text whose easy parts come late."""
    record = backoff()
    assert cooldowns(record, [LOSS, LOSS, LOSS, GAIN]) == [32, 64, 128]
    assert cooldowns(record, [LOSS] * 9)[0] == 32


def test_speculation_that_pays_goes_on() -> None:
    """Guards against a single loss among gains ending it."""
    assert cooldowns(backoff(), [GAIN, GAIN, LOSS, GAIN, LOSS, GAIN]) == []
