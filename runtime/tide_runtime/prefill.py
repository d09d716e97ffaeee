"""Run a prompt into the KV cache, in chunks, so that memory does not grow with the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from tide_runtime.backends.base import Slots
from tide_runtime.row import Row


def prefill_full(slots: Slots, row: Row, body: Sequence[str], head: Sequence[str], chunk: int) -> int:
    """Run all of the row's prompt through the graphs ``body``, ``head`` on its last token; returns the first output token."""
    seq = 0
    while row.length < row.prompt_tokens:
        seq = min(chunk, row.prompt_tokens - row.length)
        step = slots.step(row.slot, 1, seq)
        step.input_ids[0] = row.tokens[row.length : row.length + seq]
        step.place([row.length])
        for graph in body:
            step.run(graph)
        row.length += seq
    last = slots.step(row.slot, 1, 1)
    if head:
        # Only the prompt's last logits are wanted: the head runs on that one hidden state.
        last.hidden[-1][0, 0] = step.hidden[-1][0, -1]
        for graph in head:
            last.run(graph)
        return row.choose(last.logits[0, 0], int(last.token[0, 0]))
    return row.choose(step.logits[0, -1], int(step.token[0, -1]))
