"""What a draft head computes over texts, from the eager model's states: the graphs of targets are held to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tide_export.drafters.rounded import RoundedDrafter
from tide_export.quantize.layerwise import EagerPass

Array = NDArray[np.float32]


@dataclass(frozen=True)
class ExpectedDrafts:
    """What a head computes over texts of T tokens and P pairs; a pair is a token, but a text's first, and the state before it.

    Args:
        head_inputs: [S, D] for each text, what the graph of all layers gives the head.
        states: [P, D] of the head.
        scores: [P, 1], the probability of each guess.
    """

    head_inputs: list[Array]
    states: Array
    scores: Array

    @property
    def before(self) -> list[Array]:
        """[S - 1, D] for each text, what the head reads."""
        return [states[:-1] for states in self.head_inputs]


def expected_drafts(
    texts: Sequence[Sequence[int]], eager: EagerPass, drafter: RoundedDrafter, dtype: torch.dtype, rounded: bool
) -> ExpectedDrafts:
    """The modules' results. ``eager`` has the states at the embedding and at the taps; ``rounded``: see `RoundedDrafter.fuse`."""
    ends = np.cumsum([len(ids) for ids in texts])[:-1]
    modules = drafter.drafter
    by_text = {tap: np.split(eager.states[tap], ends) for tap in (0, *modules.taps)}
    head_inputs, after, scores = list[Array](), list[Array](), list[Array]()
    for number, ids in enumerate(texts):
        tapped, embedded = (
            torch.cat([torch.from_numpy(by_text[tap][number]) for tap in taps], -1)[None].to(dtype)
            for taps in (modules.taps, (0,))
        )
        before = drafter.fuse(tapped, rounded)
        head_inputs.append(before[0].float().numpy())
        if len(ids) > 1:
            if not modules.shares_embedding:
                embedded = modules.embedded(torch.tensor([ids]))
            logits, states = drafter.guess(embedded[:, 1:], before[:, :-1])
            after.append(states[0].float().numpy())
            scores.append(logits[0].float().softmax(-1).amax(-1, keepdim=True).numpy())
    return ExpectedDrafts(head_inputs, np.concatenate(after), np.concatenate(scores))
