"""The generation loop: sequences join a free place of the batch, advance together, and leave when they are finished.

Active sequences always have the first batch indices: when one leaves, the last one moves into its place. So a step covers
consecutive sequences, and nothing is computed for those that are done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.depth.policy import DepthPolicy
from tide_runtime.sequence import TokenSequence


class TokenEvent(NamedTuple):
    """``sequence`` has taken ``token``; ``text`` may be shown now."""

    sequence: TokenSequence
    token: int
    text: str


def run(
    policy: DepthPolicy, context: ExecutionContext, sequences: Sequence[TokenSequence], at_once: int | None = None
) -> Iterator[TokenEvent]:
    """Generate for all ``sequences``, ``at_once`` of them together and no more than ``context`` holds; yields every token as it
    becomes final."""
    waiting, active = deque(sequences), list[TokenSequence]()
    most = min(context.capacity, at_once or context.capacity)
    for sequence in sequences:
        sequence.batch_size = min(len(sequences), most)
    while waiting or active:
        while waiting and len(active) < most:
            sequence = waiting.popleft()
            sequence.batch_index = len(active)
            active.append(sequence)
            yield _take(sequence, policy.prefill(context, sequence))
            if sequence.finish_reason is not None:
                active.pop()
        if not active:
            continue
        before = context.layers_launched
        decoded = policy.decode(context, active)
        for sequence, tokens in zip(list(active), decoded, strict=True):
            sequence.layers_run += context.layers_launched - before
            for token in tokens:
                yield _take(sequence, token)
                if sequence.finish_reason is not None:
                    break
        _leave(context, active)


def _take(sequence: TokenSequence, token: int) -> TokenEvent:
    return TokenEvent(sequence, token, sequence.append(token))


def _leave(context: ExecutionContext, active: list[TokenSequence]) -> None:
    """Remove finished sequences; the last active sequence moves into each gap."""
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
