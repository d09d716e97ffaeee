"""``full``: every token goes through every layer. The model itself."""

from __future__ import annotations

from collections.abc import Sequence

from tide_runtime.backends.base import Slots
from tide_runtime.manifest import Manifest
from tide_runtime.policies.options import DepthOptions
from tide_runtime.prefill import prefill_full
from tide_runtime.row import Row


class FullDepth:
    """Every segment for every token."""

    name = "full"

    def __init__(self, manifest: Manifest, prefill_chunk: int, options: DepthOptions | None = None) -> None:
        self.prefill_chunk = prefill_chunk

    def prefill(self, slots: Slots, row: Row) -> int:
        return prefill_full(slots, row, self.prefill_chunk)

    def decode(self, slots: Slots, rows: Sequence[Row]) -> list[list[int]]:
        ones = [1] * len(rows)
        step = slots.step(0, ones, ones)
        step.input_ids[:] = [row.last_token for row in rows]
        step.place([row.length for row in rows])
        for graph in slots.every_layer:
            step.run(graph)
        logits, likeliest = step.logits, step.token.tolist()
        chosen = []
        for i, row in enumerate(rows):
            row.length += 1
            chosen.append([row.choose(logits[i], likeliest[i])])
        return chosen
