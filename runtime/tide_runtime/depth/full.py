"""Run a prompt into the KV cache, in chunks, so that memory does not grow with the prompt.

``full``: every token goes through every layer. The model itself."""

from __future__ import annotations

from collections.abc import Sequence

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.exits import Exit
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.requirements import refuse_depth_budget
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sequence import TokenSequence


def prefill_full(context: ExecutionContext, row: TokenSequence, chunk: int) -> int:
    """Run all of the row's prompt through every layer; returns the first output token."""
    while True:
        seq = min(chunk, row.prompt_tokens - row.num_cached_tokens)
        last = row.num_cached_tokens + seq == row.prompt_tokens
        step = context.step(row.batch_index, [seq], [int(last)])
        step.input_ids[:seq] = row.tokens[row.num_cached_tokens : row.num_cached_tokens + seq]
        step.place([row.num_cached_tokens])
        for graph in context.every_layer:
            step.run(graph)
        row.num_cached_tokens += seq
        if last:
            return row.choose(step.logits[0], int(step.token[0]))


class FullDepth:
    """Every segment for every token."""

    name = "full"

    def __init__(self, manifest: Manifest, prefill_chunk: int, options: DepthOptions | None = None) -> None:
        self.prefill_chunk = prefill_chunk

    def check_params(self, params: GenerationParams) -> None:
        refuse_depth_budget(self.name, params)

    def why_on_host(self, pads_sequences: bool) -> str | None:
        return None

    def for_device_loop(self) -> list[tuple[Exit, float]]:
        return []

    def prefill(self, context: ExecutionContext, row: TokenSequence) -> int:
        return prefill_full(context, row, self.prefill_chunk)

    def decode(self, context: ExecutionContext, rows: Sequence[TokenSequence]) -> list[list[int]]:
        ones = [1] * len(rows)
        step = context.step(0, ones, ones)
        step.input_ids[:] = [row.last_token for row in rows]
        step.place([row.num_cached_tokens for row in rows])
        for graph in context.every_layer:
            step.run(graph)
        logits, likeliest = step.logits, step.token.tolist()
        chosen = []
        for i, row in enumerate(rows):
            row.num_cached_tokens += 1
            chosen.append([row.choose(logits[i], likeliest[i])])
        return chosen
