"""The generation loop: rows join free context, advance together, and leave when they are finished.

Active rows always occupy the first slots: when one leaves, the last one moves into its place, so a step is a plain run
of slots and nothing is computed for rows that are done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.depth.policy import DepthPolicy
from tide_runtime.sequence import TokenSequence


class TokenEvent(NamedTuple):
    """``row`` has taken ``token``; ``text`` may be shown now."""

    row: TokenSequence
    token: int
    text: str


def run(
    policy: DepthPolicy, context: ExecutionContext, rows: Sequence[TokenSequence], at_once: int | None = None
) -> Iterator[TokenEvent]:
    """Generate for all ``rows``, ``at_once`` of them together and no more than there are slots; yields every token as it becomes
    final."""
    waiting, active = deque(rows), list[TokenSequence]()
    most = min(context.capacity, at_once or context.capacity)
    for row in rows:
        row.batch_size = min(len(rows), most)
    while waiting or active:
        while waiting and len(active) < most:
            row = waiting.popleft()
            row.batch_index = len(active)
            active.append(row)
            yield _take(row, policy.prefill(context, row))
            if row.finish_reason is not None:
                active.pop()
        if not active:
            continue
        for row in active:
            row.others_wait = bool(waiting)
        before = context.layers_launched
        decoded = policy.decode(context, active)
        for row, tokens in zip(list(active), decoded, strict=True):
            row.layers_run += context.layers_launched - before
            for token in tokens:
                yield _take(row, token)
                if row.finish_reason is not None:
                    break
        _leave(context, active)


def _take(row: TokenSequence, token: int) -> TokenEvent:
    return TokenEvent(row, token, row.append(token))


def _leave(context: ExecutionContext, active: list[TokenSequence]) -> None:
    """Remove finished rows; the last active row moves into each gap."""
    index = 0
    while index < len(active):
        if active[index].finish_reason is None:
            index += 1
            continue
        last = active.pop()
        if index < len(active):
            if last.finish_reason is None:
                context.move_row(last.batch_index, index, last.num_cached_tokens)
            last.batch_index = index
            active[index] = last
