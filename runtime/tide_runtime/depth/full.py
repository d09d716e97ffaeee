"""``full``: every token goes through every layer. The model itself.

Prompts run in chunks, so that memory does not grow with the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.exits import Exit
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.requirements import refuse_depth_budget
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sequence import TokenSequence


def prefill_full(context: ExecutionContext, sequence: TokenSequence, chunk: int) -> int:
    """Run all of the sequence's prompt through every layer; returns the first output token."""
    while True:
        seq = min(chunk, sequence.prompt_tokens - sequence.num_cached_tokens)
        last = sequence.num_cached_tokens + seq == sequence.prompt_tokens
        step = context.step(sequence.batch_index, [seq], [int(last)])
        step.input_ids[:seq] = sequence.tokens[sequence.num_cached_tokens : sequence.num_cached_tokens + seq]
        step.place([sequence.num_cached_tokens])
        for graph in context.every_layer:
            step.run(graph)
        sequence.num_cached_tokens += seq
        if last:
            return sequence.choose(step.logits[0], int(step.token[0]))


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

    def can_loop(self, sequence: TokenSequence) -> bool:
        return True

    def took_tokens(self, sequence: TokenSequence, depths: Sequence[int]) -> None:
        pass

    def prefill(self, context: ExecutionContext, sequence: TokenSequence) -> int:
        return prefill_full(context, sequence, self.prefill_chunk)

    def decode(self, context: ExecutionContext, sequences: Sequence[TokenSequence]) -> list[list[int]]:
        ones = [1] * len(sequences)
        step = context.step(0, ones, ones)
        step.input_ids[:] = [sequence.last_token for sequence in sequences]
        step.place([sequence.num_cached_tokens for sequence in sequences])
        for graph in context.every_layer:
            step.run(graph)
        logits, likeliest = step.logits, step.token.tolist()
        chosen = []
        for i, sequence in enumerate(sequences):
            sequence.num_cached_tokens += 1
            chosen.append([sequence.choose(logits[i], likeliest[i])])
        return chosen
