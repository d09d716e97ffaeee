"""A pass through every layer for any number of tokens of any sequences: decodes, drafts to verify and prompt chunks alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.depth.policy import PromptChunk
from tide_runtime.sequence import TokenSequence


class Logits(NamedTuple):
    """The model's own ``logits`` [S, V] for the last S tokens of a sequence, the argmax of each, and their ``states`` [S, 2H],
    where there is a draft head."""

    logits: NDArray[np.floating]
    tokens: list[int]
    states: NDArray[np.generic] | None = None


class Work(NamedTuple):
    """``tokens`` tokens of a sequence behind its cached ones; the logits of the last ``wanted`` of them."""

    sequence: TokenSequence
    tokens: int
    wanted: int


def launch_groups(
    context: ExecutionContext, rows: Sequence[int], counts: Sequence[int], places: Sequence[int]
) -> list[list[int]]:
    """What may share a launch, as lists of indices with rising rows: all, or one by one where padding would overrun a row."""
    order = sorted(range(len(rows)), key=rows.__getitem__)
    if len(order) < 2:
        return [order] if order else []
    sorted_rows = [rows[i] for i in order]
    fits = context.fits_together(
        sorted_rows[0], spread(sorted_rows, [counts[i] for i in order]), spread(sorted_rows, [places[i] for i in order])
    )
    return [order] if fits else [[i] for i in order]


def spread(rows: Sequence[int], values: Sequence[int]) -> list[int]:
    """``values`` of the rising ``rows``, from the first row to the last; 0 for rows in between."""
    span = rows[-1] - rows[0] + 1
    if len(values) == span:
        return list(values)
    spread = [0] * span
    for row, value in zip(rows, values, strict=True):
        spread[row - rows[0]] = value
    return spread


def run_full(context: ExecutionContext, work: Sequence[Work]) -> list[Logits]:
    """Run ``work`` through every layer; the wanted logits of each, valid until the next step."""
    found: list[Logits | None] = [None] * len(work)
    groups = launch_groups(
        context,
        [one.sequence.batch_index for one in work],
        [one.tokens for one in work],
        [one.sequence.num_cached_tokens for one in work],
    )
    for group in groups:
        _launch(context, work, group, found, kept=len(groups) > 1)
    return [logits for logits in found if logits is not None]


def run_decodes_and_prompts(
    context: ExecutionContext, decodes: Sequence[Work], prompts: Sequence[PromptChunk]
) -> tuple[list[Logits], list[list[int]]]:
    """One full pass for ``decodes`` and ``prompts``, apart where the context's launches take one prompt only.

    Returns the logits of each decode, and the first token behind each prompt whose last chunk this was.
    """
    chunks = [Work(chunk.sequence, chunk.tokens, chunk.wanted) for chunk in prompts]
    if context.packs_steps or not prompts:
        logits = run_full(context, [*decodes, *chunks])
        return logits[: len(decodes)], finish_chunks(prompts, logits[len(decodes) :])
    tokens = [finish_chunks([chunk], run_full(context, [work]))[0] for chunk, work in zip(prompts, chunks, strict=True)]
    return run_full(context, decodes), tokens


def finish_chunks(prompts: Sequence[PromptChunk], logits: Sequence[Logits]) -> list[list[int]]:
    """Count the chunks as cached; the first token behind each prompt that is through."""
    tokens: list[list[int]] = []
    for chunk, found in zip(prompts, logits, strict=True):
        sequence, wanted, is_last = chunk.sequence, chunk.wanted, chunk.is_last
        sequence.num_cached_tokens += chunk.tokens
        sequence.prefilled = is_last
        tokens.append([sequence.choose(found.logits[0], found.tokens[0])] if wanted else [])
    return tokens


def _launch(
    context: ExecutionContext, work: Sequence[Work], group: Sequence[int], found: list[Logits | None], kept: bool
) -> None:
    chosen = [work[i] for i in group]
    rows = [one.sequence.batch_index for one in chosen]
    step = context.step(rows[0], spread(rows, [one.tokens for one in chosen]), spread(rows, [one.wanted for one in chosen]))
    begin = 0
    for sequence, count, _ in chosen:
        cached = sequence.num_cached_tokens
        step.input_ids[begin : begin + count] = sequence.tokens[cached : cached + count]
        begin += count
    step.place(spread(rows, [one.sequence.num_cached_tokens for one in chosen]))
    for graph in context.every_layer:
        step.run(graph)
    tokens, begin = step.token[: sum(one.wanted for one in chosen)].tolist(), 0
    for i, one in zip(group, chosen, strict=True):
        end = begin + one.wanted
        logits, states = step.logits[begin:end], step.states[begin:end] if context.has_draft_head else None
        if kept:
            logits, states = logits.copy(), states.copy() if states is not None else None
        found[i] = Logits(logits, tokens[begin:end], states)
        begin = end
