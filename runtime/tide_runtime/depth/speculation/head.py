"""Drafts of the draft head: guesses from states of tokens that all layers have run for, then from its own.

A head with attention (EAGLE, Li et al. 2024, arXiv:2401.15077; multi-token prediction, Gloeckle et al. 2024, arXiv:2404.19737)
has a cache of pairs: slot p holds the state of token p and the token after it. The pairs of a text are computed after each chunk
of its prompt, and then when the head guesses next, or when they fill a block of the prefix cache. Guesses overwrite the slots
behind the text, and the pairs of accepted tokens overwrite those. A head without (Hydra, Ankner et al. 2024, arXiv:2402.05109)
reads the last pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.base import ExecutionContext, Logits
from tide_runtime.backends.draft_step import Pairs, run_draft_head
from tide_runtime.backends.kv_caches import BLOCK_TOKENS
from tide_runtime.bundle.calibration import DraftHeadInfo
from tide_runtime.depth.policy import PromptChunk
from tide_runtime.depth.speculation.drafter import Evaluation
from tide_runtime.depth.speculation.record import Guess, SpeculativeSequence


@dataclass
class HeadStates:
    """What is kept of one sequence.

    Args:
        first: its first pairs, which the head has read.
        waiting: states [n, D] of the tokens from number ``first`` on, which it has not; None: there are none.
        last_state: the head's own state [D] after its last guess.
    """

    first: int = 0
    waiting: NDArray[np.generic] | None = None
    last_state: NDArray[np.generic] | None = None


class HeadDrafter:
    """Adds one token to ``head_guess`` at each call, and keeps the states that the head reads.

    Args:
        info: None: there is no head, or it is not used.
        can_rerun: a token that the row holds can be run again for its state; not where a recurrent state has read it.

    Attributes:
        has_cache: the head attends to all pairs of a text.
    """

    def __init__(self, info: DraftHeadInfo | None, limit: int, can_rerun: bool = True) -> None:
        self.info = info
        self.limit = limit
        self.has_cache = info is not None and info.kv is not None
        self._can_rerun = self.has_cache and can_rerun

    def draft(self, context: ExecutionContext, states: Sequence[SpeculativeSequence]) -> list[Evaluation]:
        tokens, scores, last_state = run_draft_head(context, [_next_pairs(state) for state in states])
        for state, token, score, after in zip(states, tokens, scores, last_state, strict=True):
            known = state.head_guess
            state.head_guess = Guess([*known.tokens, token], [*known.evidence, score], "head")
            state.head.last_state = after
        return []

    @staticmethod
    def waiting(state: SpeculativeSequence) -> int:
        """Pairs that the first guess reads; 0: the head cannot guess."""
        kept = _kept(state)
        return len(kept.waiting) if kept.waiting is not None else 0

    def keep(self, state: SpeculativeSequence, first: int, states: NDArray[np.generic] | None, count: int) -> None:
        """All layers have run for ``count`` tokens from number ``first`` on, whose states begin ``states``; they are copied.
        None: the tokens ran in segments, which give none."""
        head_states = _kept(state)
        if self.info is None or states is None:
            head_states.waiting = None
        elif not self.has_cache:
            head_states.first = first + count - 1
            head_states.waiting = states[count - 1 : count].copy()
        elif head_states.waiting is not None:
            head_states.waiting = np.concatenate([head_states.waiting, np.asarray(states[:count])])
        elif head_states.first == first:
            head_states.waiting = states[:count].copy()

    def reusable(self, state: SpeculativeSequence) -> int:
        """How many of the text's first tokens may go into the prefix cache: those whose pairs the head has read."""
        cached = state.sequence.num_cached_tokens
        return min(cached, _kept(state).first) if self._can_rerun else cached

    def begin(self, state: SpeculativeSequence, chunk: PromptChunk) -> PromptChunk:
        """``chunk``, or one that begins a token earlier, where the row's tokens came from the prefix cache: the pair of the last
        has the token after it, which may be another text's there, and is made of its state."""
        sequence = state.sequence
        if not self._can_rerun or sequence.num_cached_tokens in (0, _kept(state).first):
            return chunk
        sequence.num_cached_tokens -= 1
        return PromptChunk(sequence, chunk.tokens + 1)

    def read_chunks(self, context: ExecutionContext, states: Sequence[SpeculativeSequence], chunks: Sequence[Logits]) -> None:
        """Put the pairs of prompt chunks, which have just run, into the cache; the last one of a prompt waits for its token."""
        pairs = list[Pairs]()
        for state, found in zip(states, chunks, strict=True):
            if found.states is None or not (count := len(found.states)):
                continue
            first = state.sequence.num_cached_tokens - count
            state.head = HeadStates(first)
            self.keep(state, first, found.states, count)
            if self.has_cache and (known := min(count, state.sequence.num_tokens - 1 - first)):
                pairs.append(_take_pairs(state, known))
        if pairs:
            run_draft_head(context, sorted(pairs, key=lambda one: one.row), guess=False)

    def read_waiting(self, context: ExecutionContext, states: Sequence[SpeculativeSequence]) -> None:
        """Put the pairs of texts for which the head did not guess into the cache, when they fill a block of the prefix cache."""
        many = [state for state in states if self.has_cache and self.waiting(state) >= BLOCK_TOKENS]
        if many:
            run_draft_head(context, [_take_pairs(state, self.waiting(state)) for state in many], guess=False)


def _kept(state: SpeculativeSequence) -> HeadStates:
    if state.head is None:
        state.head = HeadStates()
    kept: HeadStates = state.head
    return kept


def _next_pairs(state: SpeculativeSequence) -> Pairs:
    """What the next guess reads: all pairs that wait, or the guess before with the head's own state."""
    sequence = state.sequence
    guessed = state.head_guess.tokens
    kept = _kept(state)
    if not guessed:
        return _take_pairs(state, HeadDrafter.waiting(state))
    assert kept.last_state is not None
    return Pairs(sequence.batch_index, sequence.num_tokens - 2 + len(guessed), guessed[-1:], kept.last_state[None])


def _take_pairs(state: SpeculativeSequence, count: int) -> Pairs:
    """The first ``count`` pairs that wait, which wait no more."""
    kept = _kept(state)
    assert kept.waiting is not None
    taken = kept.waiting[:count]
    rest = kept.waiting[count:]
    begin = kept.first + 1
    kept.first = kept.first + count
    kept.waiting = rest if len(rest) else None
    return Pairs(state.sequence.batch_index, begin - 1, state.tokens[begin : begin + count], taken)
