"""Carry out a step's plan on the caches of an execution context, with a depth policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.backends.kv_caches import blocks_of
from tide_runtime.depth.policy import DepthPolicy
from tide_runtime.scheduling.scheduler import Request, Scheduler, SchedulerOptions, StepPlan
from tide_runtime.sequence import TokenSequence


class TokenEvent(NamedTuple):
    """``token`` was appended to ``sequence``; ``text`` may be shown now."""

    sequence: TokenSequence
    token: int
    text: str


def run_step(policy: DepthPolicy, context: ExecutionContext, plan: StepPlan) -> list[tuple[Request, list[int]]]:
    """Run ``plan``; the new tokens of each request that took part."""
    began = perf_counter()
    for request, _ in plan.prompts:  # the first step of a request prefills at least a part of its prompt
        history = request.sequence.history
        history.first_step = history.first_step or began
    for row in plan.left_rows:
        context.forget_row(row)
    for move in plan.moves:
        context.move_row(*move)
    for row in plan.released_rows:
        context.release_row(row)
    for row, _, ids, slot in plan.loads:
        assert context.prefix_blocks is not None
        context.prefix_blocks.load(ids, row)
        if slot is not None:
            assert context.snapshots is not None
            context.snapshots.load(slot, row)
    if plan.released_blocks:
        assert context.prefix_blocks is not None
        context.prefix_blocks.release(plan.released_blocks)
    if plan.released_slots:
        assert context.snapshots is not None
        context.snapshots.release(plan.released_slots)
    for request in plan.requests:
        if request.sequence.long_rotary_from is not None:
            context.position_offsets[request.sequence.batch_index] = request.sequence.position_offset
        if request.sequence.adapter is not None:
            context.adapters[request.sequence.batch_index] = request.sequence.adapter
    decoding = [request.sequence for request in plan.decoding]
    if not decoding and not plan.prompts:
        return []
    before = context.layers_launched
    tokens = policy.step(context, decoding, plan.chunks)
    for sequence in decoding:
        sequence.depth.layers_run += context.layers_launched - before
        sequence.history.peak_batch = max(sequence.history.peak_batch, len(decoding) + len(plan.prompts))
    return list(zip(plan.requests, tokens, strict=True))


def append_tokens(sequence: TokenSequence, tokens: Sequence[int]) -> Iterator[TokenEvent]:
    """Append ``tokens`` to the sequence's output, up to its end."""
    for token in tokens:
        if sequence.error is not None:
            return
        yield TokenEvent(sequence, token, sequence.append(token))
        if sequence.finish_reason is not None:
            return


def run(
    policy: DepthPolicy,
    context: ExecutionContext,
    sequences: Sequence[TokenSequence],
    at_once: int | None = None,
    chunk: int = 512,
    prompts_first: bool = True,
) -> Iterator[TokenEvent]:
    """Generate for ``sequences`` in the calling thread; yields every token as it becomes final.

    Args:
        at_once: sequences that run together; as many as ``context`` holds when omitted.
        chunk: most prompt tokens of a step.
        prompts_first: prompts run before decodes, so that the two can be timed apart; otherwise they share steps.

    Raises NumericsError.
    """
    rows = min(context.capacity, at_once or context.capacity)
    slots = max(len(sequence.tokens) for sequence in sequences)
    scheduler = Scheduler(
        SchedulerOptions(
            max_batch=rows,
            blocks=rows * blocks_of(slots),
            slots=slots,
            lookahead=policy.lookahead,
            prompt_tokens=lambda decoding: chunk,
            consecutive_rows=not context.packs_steps,
            prompts_first=prompts_first,
        )
    )
    for sequence in sequences:
        scheduler.add(Request(sequence))
    while scheduler.has_work:
        for request, tokens in run_step(policy, context, scheduler.step()):
            sequence = request.sequence
            yield from append_tokens(sequence, tokens)
            if sequence.error is not None:
                raise sequence.error
            if sequence.finish_reason is not None and (row := scheduler.remove(request)) is not None:
                context.forget_row(row)
