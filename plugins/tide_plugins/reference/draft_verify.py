"""Reference of csrc/draft_verify.cuh: greedy verification, and speculative sampling with random numbers by position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tide_plugins.reference.philox import uniform_at

RUNNING, EOS, LIMIT, NO_DISTRIBUTION = 0, 1, 2, 3
_ACCEPT, _DRAW = 0, 1


@dataclass(frozen=True)
class VerifyState:
    """State of one sequence. ``length``: cached tokens; ``last_token``: the newest token, not cached yet."""

    length: int
    last_token: int
    finished: int = RUNNING


@dataclass(frozen=True)
class Verification:
    """``tokens``: the new output. ``accepted``: number of accepted drafts, including those after the end of the sequence."""

    state: VerifyState
    accepted: int
    tokens: tuple[int, ...]


def draft_verify(
    state: VerifyState,
    drafts: Sequence[int],
    *,
    limit: int,
    eos: Sequence[int] = (),
    deep_tokens: Sequence[int] | None = None,
    probabilities: NDArray[np.floating] | None = None,
    proposals: NDArray[np.floating] | None = None,
    seed: int = 0,
) -> Verification:
    """Verify one sequence's drafts, greedily with ``deep_tokens``, else by speculative sampling (arXiv:2211.17192, algorithm 1).

    Args:
        state: before the step.
        drafts: D ids, which the step ran after the last token.
        limit: most tokens of prompt and output.
        eos: ids that end a sequence.
        deep_tokens: D + 1 ids: the model's argmax after the last token and after each draft.
        probabilities: [D + 1, V] the model's distributions at the same places.
        proposals: [D, V] distributions that the drafts were sampled from; None: deterministic drafts.
        seed: the sequence's seed.
    """
    if state.finished != RUNNING:
        return Verification(state, 0, ())
    if probabilities is None:
        assert deep_tokens is not None
        accepted = _agreeing(drafts, deep_tokens)
        own: int | None = deep_tokens[accepted]
    else:
        accepted = _accepted(state, drafts, probabilities, proposals, seed)
        own = _drawn(state, drafts, accepted, probabilities, proposals, seed)
    return _emitted(state, [*drafts[:accepted], own], accepted, limit, eos)


def rest_distribution(
    drafts: Sequence[int], accepted: int, probabilities: NDArray[np.floating], proposals: NDArray[np.floating] | None
) -> NDArray[np.float64]:
    """Unnormalized distribution [V] of the token after ``accepted`` drafts: p, or max(0, p - q) after a rejection."""
    wanted = probabilities[accepted].astype(np.float64)
    if accepted == len(drafts):
        return wanted
    if proposals is None:
        wanted[drafts[accepted]] = 0.0
        return wanted
    # In float32 like the kernel, because the sign of a small difference decides which tokens remain.
    difference = probabilities[accepted].astype(np.float32) - proposals[accepted].astype(np.float32)
    return np.maximum(difference, 0.0).astype(np.float64)


def _agreeing(drafts: Sequence[int], deep_tokens: Sequence[int]) -> int:
    return next((i for i, draft in enumerate(drafts) if draft != deep_tokens[i]), len(drafts))


def _accepted(
    state: VerifyState,
    drafts: Sequence[int],
    probabilities: NDArray[np.floating],
    proposals: NDArray[np.floating] | None,
    seed: int,
) -> int:
    for place, draft in enumerate(drafts):
        proposed = np.float32(1.0 if proposals is None else proposals[place, draft])
        u = np.float32(uniform_at(seed, state.length + 1 + place, _ACCEPT))
        if not u * proposed < np.float32(probabilities[place, draft]):
            return place
    return len(drafts)


def _drawn(
    state: VerifyState,
    drafts: Sequence[int],
    accepted: int,
    probabilities: NDArray[np.floating],
    proposals: NDArray[np.floating] | None,
    seed: int,
) -> int | None:
    weights = rest_distribution(drafts, accepted, probabilities, proposals)
    cumulative = np.cumsum(weights)
    if not (0 < cumulative[-1] <= np.finfo(np.float32).max):
        return None
    u = uniform_at(seed, state.length + 1 + accepted, _DRAW)
    return int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))


def _emitted(state: VerifyState, found: Sequence[int | None], accepted: int, limit: int, eos: Sequence[int]) -> Verification:
    tokens: list[int] = []
    finished = RUNNING
    for token in found:
        if token is None:
            finished = NO_DISTRIBUTION
            break
        tokens.append(token)
        if token in eos:
            finished = EOS
            break
        if state.length + 1 + len(tokens) >= limit:
            finished = LIMIT
            break
    after = replace(state, length=state.length + len(tokens), finished=finished)
    return Verification(replace(after, last_token=tokens[-1]) if tokens else after, accepted, tuple(tokens))
