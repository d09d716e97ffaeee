"""Drafts of the draft head: guesses from states of the last token that all layers have run for, then from its own.

A head of one feed-forward block, whose state goes on from guess to guess (EAGLE, Li et al. 2024, arXiv:2401.15077, which also has
attention; Hydra, Ankner et al. 2024, arXiv:2402.05109, without).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.backends.draft_step import run_draft_head
from tide_runtime.depth.speculation.drafter import Evaluation
from tide_runtime.depth.speculation.record import Guess, SpeculativeSequence


class HeadDrafter:
    """Adds one token to ``head_guess`` at each call, and leaves the state after it in ``head_state``: the verification pass
    replaces that by the model's own."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def draft(self, context: ExecutionContext, states: Sequence[SpeculativeSequence]) -> list[Evaluation]:
        tokens, scores, hidden = run_draft_head(
            context,
            [state.sequence.batch_index for state in states],
            [state.head_guess.tokens[-1] if state.head_guess.tokens else state.sequence.last_token for state in states],
            np.stack([state.head_state for state in states if state.head_state is not None]),
            [state.sequence.num_tokens - 1 + len(state.head_guess.tokens) for state in states],
        )
        for state, token, score, own in zip(states, tokens, scores, hidden, strict=True):
            known = state.head_guess
            state.head_guess = Guess([*known.tokens, token], [*known.evidence, score], "head")
            state.head_state = own
        return []
