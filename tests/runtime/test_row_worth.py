"""What a token is worth in each row of a batch that only shrinks from here on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from tide_runtime import Engine, GenerationParams
from tide_runtime.backends.base import Slots
from tide_runtime.policies.full import FullDepth
from tide_runtime.row import Row
from tide_runtime.row_worth import row_worth


def step_ms(rows: int) -> float:
    """Most of a step is the same for any number of rows."""
    return 4.0 + rows


def test_rows_that_finish_together_are_worth_the_same() -> None:
    """A batch that just began would favour a row for no reason."""
    assert row_worth([60, 58, 57, 60], step_ms) == [1.0] * 4


def test_the_last_row_is_worth_the_steps_it_has_to_itself() -> None:
    """The batch would hurry rows that nobody waits for, and wait for one that it has not hurried."""
    worth = row_worth([20, 60, 30], step_ms)
    assert worth[1] > 1 > worth[2] == worth[0]
    assert sum(worth) == pytest.approx(3)
    assert worth[1] - 1 == pytest.approx(0.5 * (step_ms(1) / (step_ms(3) / 3) - 1))


class WatchedPolicy(FullDepth):
    """Notes at every step how many rows run, and whether others wait."""

    seen: list[tuple[int, set[bool]]]

    def decode(self, slots: Slots, rows: Sequence[Row]) -> list[list[int]]:
        self.seen.append((len(rows), {row.awaited for row in rows}))
        return super().decode(slots, rows)


def test_rows_are_awaited_while_others_wait_for_a_place(load: Callable[..., Engine]) -> None:
    """A queue would be served as if it were empty, or its end as if it went on."""
    with load(max_batch=2) as engine:
        policy = WatchedPolicy(engine.manifest, 64)
        policy.seen = []
        engine.policy = policy
        engine.generate([[1, 2]] * 3, GenerationParams(max_new_tokens=4, ignore_eos=True))
    assert policy.seen == [(2, {True})] * 3 + [(1, {False})] * 3
