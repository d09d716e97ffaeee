"""Verify drafts with the model's own logits: an accepted draft is a token that the model would have generated.

Greedy: a draft is accepted when it is the token the model chooses. Sampling: speculative sampling (Leviathan et al. 2023,
arXiv:2211.17192, algorithm 1): accepted with probability min(1, p/q), else redrawn from max(0, p - q), which leaves the
model's distribution p untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tide_runtime.sequence import TokenSequence


class Logits(NamedTuple):
    """The model's own ``logits`` [S, V] for the last S tokens of a sequence, and the argmax of each."""

    logits: NDArray[np.floating]
    tokens: list[int]


class Draft(NamedTuple):
    """A proposed token. ``proposal``: the distribution [V] it was drawn from; None when it was certain (a one-hot)."""

    token: int
    source: str
    depth: int
    proposal: NDArray[np.float64] | None = None


def verify(sequence: TokenSequence, drafts: Sequence[Draft], verified: Logits) -> tuple[list[int], int]:
    """The sequence's next output tokens and how many of ``drafts`` are among them.

    ``verified`` holds the model's logits after the last output token and after each draft; the drafts stand in
    ``sequence.tokens`` behind ``sequence.num_tokens``. Accepted drafts are followed by one token of the model's own.
    """
    tokens: list[int] = []
    for place, draft in enumerate(drafts):
        token = _one(sequence, draft, verified, place)
        tokens.append(token)
        if token != draft.token:
            return tokens, place
    place = len(drafts)
    tokens.append(sequence.choose(verified.logits[place], verified.tokens[place], sequence.num_tokens + place))
    return tokens, place


def _one(sequence: TokenSequence, draft: Draft, verified: Logits, place: int) -> int:
    logits = verified.logits[place]
    if sequence.params.greedy:
        return sequence.choose(logits, verified.tokens[place], sequence.num_tokens + place)
    wanted = sequence.sampler.distribution(np.asarray(logits, np.float32), sequence.tokens[: sequence.num_tokens + place])
    proposed = 1.0 if draft.proposal is None else float(draft.proposal[draft.token])
    token = draft.token
    if sequence.sampler.uniform() * proposed >= wanted[token]:
        token = sequence.sampler.draw(_residual(wanted, draft))
    sequence.note_logprobs(logits, token)
    return token


def _residual(wanted: NDArray[np.float64], draft: Draft) -> NDArray[np.float64]:
    """max(0, p - q), not normalised: `Sampler.draw` does that."""
    if draft.proposal is None:
        rest = wanted.copy()
        rest[draft.token] = 0.0
        return rest
    return np.maximum(wanted - draft.proposal, 0.0)
