"""The generation loop: rows join free slots, advance together, and leave when they are finished.

Active rows always occupy the first slots: when one leaves, the last one moves into its place, so a step is a plain run
of slots and nothing is computed for rows that are done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tide_runtime.backends.base import Slots
from tide_runtime.policies.base import DepthPolicy
from tide_runtime.row import Row


class TokenEvent(NamedTuple):
    """``row`` has taken ``token``; ``text`` may be shown now."""

    row: Row
    token: int
    text: str


def run(policy: DepthPolicy, slots: Slots, rows: Sequence[Row], at_once: int | None = None) -> Iterator[TokenEvent]:
    """Generate for all ``rows``, ``at_once`` of them together and no more than there are slots; yields every token as it becomes
    final."""
    waiting, active = deque(rows), list[Row]()
    most = min(slots.capacity, at_once or slots.capacity)
    for row in rows:
        row.width = min(len(rows), most)
    while waiting or active:
        while waiting and len(active) < most:
            row = waiting.popleft()
            row.slot = len(active)
            active.append(row)
            yield _take(row, policy.prefill(slots, row))
            if row.finish_reason is not None:
                active.pop()
        if not active:
            continue
        for row in active:
            row.awaited = bool(waiting)
        before = slots.layers_launched
        decoded = policy.decode(slots, active)
        for row, tokens in zip(list(active), decoded, strict=True):
            row.layers_run += slots.layers_launched - before
            for token in tokens:
                yield _take(row, token)
                if row.finish_reason is not None:
                    break
        _leave(slots, active)


def _take(row: Row, token: int) -> TokenEvent:
    return TokenEvent(row, token, row.append(token))


def _leave(slots: Slots, active: list[Row]) -> None:
    """Remove finished rows; the last active row moves into each gap."""
    index = 0
    while index < len(active):
        if active[index].finish_reason is None:
            index += 1
            continue
        last = active.pop()
        if index < len(active):
            if last.finish_reason is None:
                slots.move_row(last.slot, index, last.length)
            last.slot = index
            active[index] = last
