"""Run a prompt into the KV cache, in chunks, so that memory does not grow with the prompt."""

from __future__ import annotations

from tide_runtime.backends.base import Slots
from tide_runtime.row import Row


def prefill_full(slots: Slots, row: Row, chunk: int) -> int:
    """Run all of the row's prompt through every layer; returns the first output token."""
    while True:
        seq = min(chunk, row.prompt_tokens - row.length)
        last = row.length + seq == row.prompt_tokens
        step = slots.step(row.slot, [seq], [int(last)])
        step.input_ids[:seq] = row.tokens[row.length : row.length + seq]
        step.place([row.length])
        for graph in slots.every_layer:
            step.run(graph)
        row.length += seq
        if last:
            return row.choose(step.logits[0], int(step.token[0]))
