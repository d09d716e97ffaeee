"""Hold drafts against the model's own logits: what is accepted is what the model would have said.

Greedy: a draft is accepted when it is the token the model chooses. Sampling: speculative sampling (Leviathan et al. 2023,
arXiv:2211.17192, algorithm 1): accepted with probability min(1, p/q), else redrawn from max(0, p - q), which leaves the
model's distribution p untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tide_runtime.depth.executor import Logits
from tide_runtime.sequence import TokenSequence


class Draft(NamedTuple):
    """A proposed token.

    ``proposal``: the distribution [V] it was drawn from, None when it was certain (a one-hot); ``exit``: number of the exit that
    it comes from.
    """

    token: int
    source: str
    depth: int
    proposal: NDArray[np.float64] | None = None
    exit: int | None = None


def verify(row: TokenSequence, drafts: Sequence[Draft], deep: Logits) -> tuple[list[int], int]:
    """The row's next output tokens and how many of ``drafts`` are among them.

    ``deep`` holds the model's logits after the last output token and after each draft; the drafts stand in ``row.tokens``
    behind ``row.num_tokens``. Accepted drafts are followed by one token of the model's own.
    """
    tokens: list[int] = []
    for place, draft in enumerate(drafts):
        token = _one(row, draft, deep, place)
        tokens.append(token)
        if token != draft.token:
            return tokens, place
    place = len(drafts)
    tokens.append(row.choose(deep.logits[place], deep.tokens[place], row.num_tokens + place))
    return tokens, place


def _one(row: TokenSequence, draft: Draft, deep: Logits, place: int) -> int:
    logits = deep.logits[place]
    if row.params.greedy:
        return row.choose(logits, deep.tokens[place], row.num_tokens + place)
    wanted = row.sampler.distribution(np.asarray(logits, np.float32), row.tokens[: row.num_tokens + place])
    proposed = 1.0 if draft.proposal is None else float(draft.proposal[draft.token])
    token = draft.token
    if row.sampler.uniform() * proposed >= wanted[token]:
        token = row.sampler.draw(_residual(wanted, draft))
    row.note_logprobs(logits, token)
    return token


def _residual(wanted: NDArray[np.float64], draft: Draft) -> NDArray[np.float64]:
    """max(0, p - q), not normalised: `Sampler.draw` does that."""
    if draft.proposal is None:
        rest = wanted.copy()
        rest[draft.token] = 0.0
        return rest
    return np.maximum(wanted - draft.proposal, 0.0)
