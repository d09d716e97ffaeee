"""``full``: every token goes through every layer, in one pass for decodes, drafts to verify and prompt chunks alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np

from tide_runtime.backends.base import ExecutionContext, Logits, Step
from tide_runtime.backends.device.device_rows import DeviceRows
from tide_runtime.depth.policy import DevicePlan, PromptChunk, refuse_depth_budget
from tide_runtime.generation_params import GenerationParams
from tide_runtime.sequence import TokenSequence


class FullDepth:
    """Every segment for every token."""

    name = "full"
    lookahead = 1
    can_resume = True
    runs_every_layer = True
    uses_draft_head, loops_as_rows = False, False

    def check_params(self, params: GenerationParams) -> None:
        refuse_depth_budget(self.name, params)

    def device_plan(self) -> DevicePlan:
        return DevicePlan(self)

    def reusable_tokens(self, sequence: TokenSequence) -> int:
        return sequence.num_cached_tokens

    def step(
        self, context: ExecutionContext, decoding: Sequence[TokenSequence], prompts: Sequence[PromptChunk]
    ) -> list[list[int]]:
        decodes, chunks = run_full(context, [Work(sequence, 1, 1) for sequence in decoding], prompts)
        tokens = []
        for sequence, found, drawn in zip(decoding, decodes, draw_together(decoding, decodes), strict=True):
            sequence.num_cached_tokens += 1
            tokens.append([sequence.choose(found.logits[0], found.tokens[0], drawn=drawn)])
        return tokens + finish_chunks(prompts, chunks)


class Work(NamedTuple):
    """``tokens`` tokens of a sequence after its cached ones; the logits of the last ``num_logits`` of them."""

    sequence: TokenSequence
    tokens: int
    num_logits: int


class Part(NamedTuple):
    """``tokens`` tokens of one row in a step, in cache slots from ``slot`` on, and how many of the last give logits."""

    row: int
    tokens: int
    slot: int
    num_logits: int


class StepRows(NamedTuple):
    """What a step is made of: rows from ``first`` on, with zeros for those between the parts.

    Args:
        parts: indices of its parts, by rising rows.
    """

    parts: Sequence[int]
    first: int
    tokens: list[int]
    slots: list[int]
    num_logits: list[int]

    @classmethod
    def of(cls, parts: Sequence[Part], chosen: Sequence[int]) -> StepRows:
        """The step of the parts at ``chosen``, whose rows rise."""
        first = parts[chosen[0]].row
        span = parts[chosen[-1]].row - first + 1
        tokens = [0] * span
        slots = [0] * span
        num_logits = [0] * span
        for i in chosen:
            row, count, slot, logits = parts[i]
            tokens[row - first], slots[row - first], num_logits[row - first] = count, slot, logits
        return cls(chosen, first, tokens, slots, num_logits)


def steps_of(context: ExecutionContext, parts: Sequence[Part]) -> list[StepRows]:
    """One step for all ``parts``, or one for each where the padding of a shared one would overrun a row."""
    if len(parts) < 2:
        return [StepRows.of(parts, [0])] if parts else []
    order = sorted(range(len(parts)), key=lambda i: parts[i].row)
    shared = StepRows.of(parts, order)
    if context.fits_together(shared.first, shared.tokens, shared.slots):
        return [shared]
    return [StepRows.of(parts, [i]) for i in order]


def run_full(
    context: ExecutionContext, decodes: Sequence[Work], prompts: Sequence[PromptChunk]
) -> tuple[list[Logits], list[Logits]]:
    """A pass through every layer for ``decodes`` and ``prompts``, together where the context's steps take that.

    Returns the wanted logits of each decode and of each prompt, valid until the next step.
    """
    work: list[Work | PromptChunk] = [*decodes, *prompts]
    parts = [Part(one.sequence.batch_index, one.tokens, one.sequence.num_cached_tokens, one.num_logits) for one in work]
    if context.packs_steps or not prompts:
        steps = steps_of(context, parts)
    else:
        alone = [StepRows.of(parts, [i]) for i in range(len(decodes), len(parts))]
        steps = alone + steps_of(context, parts[: len(decodes)])
    logits_of: dict[int, Logits] = {}
    for rows in steps:
        step = context.step(rows.first, rows.tokens, rows.num_logits)
        begin = 0
        for i in rows.parts:
            _, count, slot, _ = parts[i]
            step.input_ids[begin : begin + count] = work[i].sequence.tokens[slot : slot + count]
            begin += count
        step.place(rows.slots)
        step.run_all(context.every_layer)
        num_logits = {i: parts[i].num_logits for i in rows.parts}
        states = num_logits if context.has_draft_head else {}
        if context.has_draft_head and context.has_draft_cache:
            states = {i: parts[i].tokens for i in rows.parts}
        logits_of |= read_logits(step, num_logits, rows is not steps[-1], states)
    logits = [logits_of[i] for i in range(len(work))]
    return logits[: len(decodes)], logits[len(decodes) :]


def read_logits(
    step: Step, num_logits: Mapping[int, int], copied: bool, states: Mapping[int, int] | None = None
) -> dict[int, Logits]:
    """The logits of a step: part → those of its last ``num_logits`` tokens; ``copied`` where another step runs before their use.

    Args:
        states: part → of how many tokens the step has states; none: it has none.
    """
    tokens = step.token[: sum(num_logits.values())].tolist()
    found = dict[int, Logits]()
    begin = 0
    first = 0
    for i, count in num_logits.items():
        end = begin + count
        logits = step.logits[begin : begin + count]
        own_states = None
        if states:
            own_states = step.states[first : first + states[i]]
            first += states[i]
        if copied and count:
            logits = logits.copy()
        if copied and own_states is not None:
            own_states = own_states.copy()
        found[i], begin = Logits(logits, tokens[begin:end], own_states), end
    return found


def draw_together(sequences: Sequence[TokenSequence], found: Sequence[Logits]) -> list[int]:
    """The tokens that a device draws from the first logits of each sequence, in one launch and one copy; -1: each has to be
    chosen by itself, as where the logits are the host's or do not stand one after the other."""
    alone = [-1] * len(sequences)
    sampled = [seq for seq in sequences if not (seq.params.greedy or seq.params.changes_logits)]
    if len(sampled) < 2 or any(isinstance(one.logits, np.ndarray) for one in found):
        return alone
    rows = [cast(DeviceRows, one.logits) for one in found]
    first = rows[0][0].pointer
    sampling = rows[0].sampling
    step = rows[0].row_bytes
    if sampling is None or any(row[0].pointer != first + step * i for i, row in enumerate(rows)):
        return alone
    return sampling.choose(first, [seq.sampler for seq in sequences], [seq.num_tokens for seq in sequences])


def finish_chunks(prompts: Sequence[PromptChunk], logits: Sequence[Logits]) -> list[list[int]]:
    """Count the chunks as cached; the first output token of each prompt that is finished."""
    tokens: list[list[int]] = []
    for chunk, found in zip(prompts, logits, strict=True):
        sequence, is_last = chunk.sequence, chunk.is_last
        sequence.num_cached_tokens += chunk.tokens
        sequence.prefilled = is_last
        first = sequence.num_cached_tokens - len(found.tokens) + 1
        chosen = [sequence.choose(*one, first + n) for n, one in enumerate(zip(found.logits, found.tokens, strict=True))]
        tokens.append(chosen[-1:] if is_last else [])
    return tokens
