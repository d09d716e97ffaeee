"""The filters of sampling: which tokens top-k, top-p and min-p keep, in this order.

They keep what those of `transformers.generation` (logits_process.py) keep, ties included, and at least one token. Each passes
over the whole vocabulary in float32 once, for a bound that leaves few tokens to look at closely.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tide_runtime.generation_params import GenerationParams

Values = NDArray[np.float32]
Ids = NDArray[np.intp]
_SLACK = 1e-5  # relative; above all rounding of top-p's sums, which are of float32 probabilities and in float64
TINY = float(np.finfo(np.float32).tiny)  # smallest weight and temperature of float32 arithmetic
_COLUMN = 32  # tokens of which top-k's bound takes the largest


def filter_tokens(values: Values, params: GenerationParams) -> Ids | None:
    """Ascending places in logits ``values`` [n], whose maximum is finite, of the tokens that are kept; None: all are."""
    ids: Ids | None = None
    for keep in _filters(params):
        found = keep(values if ids is None else values[ids], params)
        ids = found if ids is None else ids[found]
    return ids


def _filters(params: GenerationParams) -> list[Callable[[Values, GenerationParams], Ids]]:
    return [keep for on, keep in ((params.top_k > 0, _top_k), (params.top_p < 1, _top_p), (params.min_p > 0, _min_p)) if on]


def weights(values: Values, temperature: float, best: np.float32) -> Values:
    """[n] float32: probabilities of logits ``values`` [n] relative to that of a logit ``best``."""
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
        made = values - best  # one array: memory for a new one is mapped page by page, which takes longer than the arithmetic
        made /= np.float32(max(temperature, TINY))
        return np.exp(made, out=made)


def _top_k(values: Values, params: GenerationParams) -> Ids:
    """Tokens tied with the k-th are all kept, as in HF's TopKLogitsWarper.

    The k-th largest of columns' maxima is at most the k-th largest of all.
    """
    k = min(params.top_k, values.size)
    columns = values.size // _COLUMN
    candidates = None
    if k <= columns:
        peaks = values[: columns * _COLUMN].reshape(_COLUMN, columns).max(0)
        candidates = np.flatnonzero(values >= _largest(peaks, k))
        values = values[candidates]
    found = np.flatnonzero(values >= _largest(values, k))
    return found if candidates is None else candidates[found]


def _largest(values: Values, k: int) -> np.float32:
    """The k-th largest."""
    place = values.size - k
    return np.float32(np.partition(values, place)[place])


def _top_p(values: Values, params: GenerationParams) -> Ids:
    """Drops the least likely tokens with a sum <= 1 - p; of tied tokens the lower ids go first (torch: any).

    A token with at most 1/n of 1 - p, of n tokens, is always dropped: itself and all less likely ones sum to no more than 1 - p.
    So only the rest is sorted. Where rounding could decide, all are sorted, with probabilities rounded as HF's are.
    """
    relative = weights(values, params.temperature, values.max())
    total = relative.sum(dtype=np.float64)
    # Rounded to float32 where HF's are: in float64, 1 - 0.9 is less than 0.1, and exact sums fall the other way.
    limit = np.float32(1 - params.top_p)
    candidates = np.flatnonzero(relative > (1 - _SLACK) * (1 - params.top_p) / values.size * total)
    ascending = candidates[np.argsort(values[candidates], kind="stable")]
    sorted_weights = relative[ascending]
    relative[candidates] = 0
    sums = (relative.sum(dtype=np.float64) + np.cumsum(sorted_weights, dtype=np.float64)) / total
    if np.any(np.abs(sums[:-1] - limit) <= _SLACK * limit):
        return _top_p_of_all(values, params.temperature, limit)
    return np.sort(ascending[np.append(sums[:-1] > limit, True)])


def _top_p_of_all(values: Values, temperature: float, limit: np.float32) -> Ids:
    scores = (values.astype(np.float64) - values.max()) / temperature
    relative = np.exp(scores.astype(np.float32))
    probabilities = np.divide(relative, relative.sum(dtype=np.float64), dtype=np.float32, casting="same_kind")
    ids = np.flatnonzero(values > -np.inf)
    ascending = ids[np.argsort(values[ids], kind="stable")]
    sums = np.cumsum(probabilities[ascending], dtype=np.float64).astype(np.float32)
    return np.sort(ascending[np.append(sums[:-1] > limit, True)])


def _min_p(values: Values, params: GenerationParams) -> Ids:
    """Keeps tokens at least `min_p` times as likely as the likeliest (arXiv:2407.01082)."""
    best = np.float64(values.max())
    bound = np.nextafter(np.float32(best + params.temperature * (np.log(params.min_p) - 1)), np.float32(-np.inf))
    near = np.flatnonzero(values > bound)
    scores = (values[near].astype(np.float64) - best) / params.temperature
    return near[np.exp(scores).astype(np.float32) >= np.float32(params.min_p)]
