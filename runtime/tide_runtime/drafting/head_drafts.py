"""Run the draft head for the sequences of a batch while another guess is worth its time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.backends.draft_step import run_draft_head
from tide_runtime.drafting.controller import DraftController, DraftState
from tide_runtime.sequence import TokenSequence


def draft_with_head(
    context: ExecutionContext,
    controller: DraftController,
    sequences: Sequence[TokenSequence],
    states: Sequence[DraftState],
    text: Sequence[Sequence[float]],
    ready: Sequence[int],
    hidden: NDArray[np.generic],
    prompt_tokens: int,
) -> float:
    """Let the head guess in the sequences at ``ready``, together, into ``states[i].head``; returns the modelled ms.

    Args:
        hidden: [n, 2H], states of the token before the last one of each sequence at ``ready``.
        text, prompt_tokens: see `DraftController.head_pays`.
    """
    chosen = [sequences[i] for i in ready]
    rows, tokens = [s.batch_index for s in chosen], [s.last_token for s in chosen]
    places, spent = [s.num_tokens - 1 for s in chosen], 0.0
    while controller.head_pays(states, text, ready, spent, prompt_tokens):
        tokens, scores, hidden = run_draft_head(context, rows, tokens, hidden, places)
        spent += controller.costs.draft_head(len(ready), first=not spent)
        places = [place + 1 for place in places]
        for i, token, score in zip(ready, tokens, scores, strict=True):
            head = states[i].head
            assert head is not None
            head.tokens.append(token)
            head.scores.append(score)
    return spent
