"""``full``: every token goes through every layer. The model itself."""

from __future__ import annotations

from collections.abc import Sequence

from tide_runtime.backends.base import Slots, Step
from tide_runtime.manifest import Manifest
from tide_runtime.row import Row


class FullDepth:
    """Prefill in chunks of ``prefill_chunk`` tokens, so that its memory does not grow with the prompt."""

    name = "full"

    def __init__(self, manifest: Manifest, prefill_chunk: int) -> None:
        self.body = [segment.name for segment in manifest.segments]
        self.head = ["head"]
        self.prefill_chunk = prefill_chunk

    def prefill(self, slots: Slots, row: Row) -> int:
        step: Step | None = None
        while row.length < row.prompt_tokens:
            count = min(self.prefill_chunk, row.prompt_tokens - row.length)
            step = slots.step(row.slot, 1, count)
            step.input_ids[0] = row.tokens[row.length : row.length + count]
            step.place([row.length])
            for graph in self.body:
                step.run(graph)
            row.length += count
        assert step is not None
        return self._first_token(slots, row, step)

    def decode(self, slots: Slots, rows: Sequence[Row]) -> list[list[int]]:
        step = slots.step(0, len(rows), 1)
        step.input_ids[:, 0] = [row.last_token for row in rows]
        step.place([row.length for row in rows])
        for graph in (*self.body, *self.head):
            step.run(graph)
        logits, likeliest = step.logits[:, 0], step.token[:, 0].tolist()
        chosen = []
        for i, row in enumerate(rows):
            row.length += 1
            chosen.append([row.choose(logits[i], likeliest[i])])
        return chosen

    def _first_token(self, slots: Slots, row: Row, step: Step) -> int:
        """Only the prompt's last logits are wanted: the head runs on that one hidden state."""
        last = slots.step(row.slot, 1, 1)
        last.hidden[-1][0, 0] = step.hidden[-1][0, -1]
        for graph in self.head:
            last.run(graph)
        return row.choose(last.logits[0, 0], int(last.token[0, 0]))
