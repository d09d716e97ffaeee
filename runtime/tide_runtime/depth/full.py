"""``full``: every token goes through every layer. The model itself."""

from __future__ import annotations

from collections.abc import Sequence

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.bundle.exits import Exit
from tide_runtime.depth.full_pass import Work, run_decodes_and_prompts
from tide_runtime.depth.policy import PromptChunk
from tide_runtime.depth.requirements import refuse_depth_budget
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sequence import TokenSequence


class FullDepth:
    """Every segment for every token."""

    name, lookahead, can_resume = "full", 1, True

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

    def settled(self, sequence: TokenSequence) -> int:
        return sequence.num_cached_tokens

    def step(
        self, context: ExecutionContext, decoding: Sequence[TokenSequence], prompts: Sequence[PromptChunk]
    ) -> list[list[int]]:
        decodes, first = run_decodes_and_prompts(context, [Work(sequence, 1, 1) for sequence in decoding], prompts)
        chosen = []
        for sequence, found in zip(decoding, decodes, strict=True):
            sequence.num_cached_tokens += 1
            chosen.append([sequence.choose(found.logits[0], found.tokens[0])])
        return chosen + first
