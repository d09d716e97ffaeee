"""Choosing the next token of one row from its logits.

The filters, their order, and what they do with ties are those of `transformers.generation` (logits_process.py):
repetition penalty, temperature, top-k, top-p, min-p; each keeps at least one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tide_runtime.errors import BundleError, NumericsError
from tide_runtime.generation_params import GenerationParams

FloatArray = NDArray[np.floating]
_BLOCK = 256  # probabilities that `Sampler.draw` looks at one by one


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of a chosen token, and of the likeliest ones, before penalty, temperature and filters.

    Args:
        token: id of the chosen token.
        logprob: its log-probability, <= 0.
        top: (id, log-probability) of the likeliest tokens, likeliest first, ties by lower id.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Draws the tokens of one row.

    Args:
        params: the caller's generation parameters.
        vocab_size: length V of the logits.
        row: which row of the batch; with the same seed, each row has its own reproducible stream.
    """

    def __init__(self, params: GenerationParams, vocab_size: int, row: int = 0) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self._blocks = np.arange(0, vocab_size, _BLOCK)
        # The row as spawn key is what SeedSequence.spawn gives child number `row`: streams that do not overlap.
        self._random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(params.seed, spawn_key=(row,))))

    def sample(self, logits: FloatArray, seen: NDArray[np.integer]) -> int:
        """The next token id.

        Args:
            logits: [V] float.
            seen: [S] ids of the prompt and of the output so far; duplicates are welcome.

        Raises:
            NumericsError: the logits hold NaN, or their maximum is infinite.
        """
        if self.params.greedy:
            return _likeliest(self._penalised(logits, seen))
        return self.draw(self.distribution(logits, seen))

    def distribution(self, logits: FloatArray, seen: NDArray[np.integer]) -> NDArray[np.float64]:
        """The probabilities `sample` draws from, [V] float64, summing to 1; one-hot when greedy.

        Arguments and errors are those of `sample`.
        """
        scores = self._penalised(logits, seen)
        best = _likeliest(scores)
        if self.params.greedy:
            certain = np.zeros(self.vocab_size)
            certain[best] = 1
            return certain
        shifted = scores.astype(np.float64) - np.float64(scores[best])
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
            return _softmax(self._filtered(shifted / self.params.temperature))

    def draw(self, probabilities: NDArray[np.float64]) -> int:
        """A token id drawn from probabilities [V], by inversion: one uniform number a token.

        First a block of them, then one of the block: adding up all of a large vocabulary one by one would take ten times as long.
        """
        of_blocks = np.add.reduceat(probabilities, self._blocks)
        wanted = self.uniform() * float(of_blocks.sum())
        block = _reached(of_blocks, wanted)
        begin, left = block * _BLOCK, max(0.0, wanted - float(of_blocks[:block].sum()))
        return begin + _reached(probabilities[begin : begin + _BLOCK], left)

    def uniform(self) -> float:
        """A number in [0, 1) from this row's stream; speculative verification accepts or rejects with it."""
        return float(self._random.random())

    def logprobs(self, logits: FloatArray, token: int, k: int) -> TokenLogprob:
        """Log-probability of `token` and of the `k` likeliest tokens under the raw logits [V]."""
        raw = self._checked(logits)
        peak = np.float64(raw[_likeliest(raw)])
        shifted = raw.astype(np.float64) - peak
        logprobs = shifted - np.log(np.exp(shifted).sum())
        top = tuple((int(i), float(logprobs[i])) for i in _top_ids(logprobs, k))
        return TokenLogprob(token, float(logprobs[token]), top)

    def _penalised(self, logits: FloatArray, seen: NDArray[np.integer]) -> FloatArray:
        """CTRL's penalty (arXiv:1909.05858, section 4.1) as HF applies it: once per distinct id, away from likely."""
        raw, penalty = self._checked(logits), self.params.repetition_penalty
        if penalty == 1 or len(seen) == 0:
            return raw
        scores = raw.astype(np.float32)
        values = scores[seen]
        scores[seen] = np.where(values < 0, values * penalty, values / penalty)
        return scores

    def _filtered(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        if self.params.top_k:
            scores = _keep_top_k(scores, self.params.top_k)
        if self.params.top_p < 1:
            scores = _keep_top_p(scores, self.params.top_p)
        if self.params.min_p > 0:
            scores = _keep_min_p(scores, self.params.min_p)
        return scores

    def _checked(self, logits: FloatArray) -> FloatArray:
        if logits.shape != (self.vocab_size,):
            raise BundleError(
                f"The exit head returned logits of shape {logits.shape}, the vocabulary needs ({self.vocab_size},): "
                "the bundle's parts do not belong together; export it again."
            )
        return logits


def _reached(weights: NDArray[np.float64], wanted: float) -> int:
    """The first place up to which the weights sum to more than ``wanted``; where rounding leaves none, the last with any."""
    ends = np.cumsum(weights)
    place = int(np.searchsorted(ends, wanted, side="right"))
    return place if place < ends.size else int(np.flatnonzero(weights)[-1])


def _likeliest(scores: FloatArray) -> int:
    """Index of the maximum, the first of equals. argmax stops at NaN, so one look at the winner checks them all."""
    best = int(np.argmax(scores))
    if not np.isfinite(scores[best]):
        raise NumericsError(
            f"The model produced {'NaN' if np.isnan(scores[best]) else 'infinite'} logits (at token {best}), expected "
            "finite ones; compare the bundle with the eager model, or build it for a target of higher precision."
        )
    return best


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Softmax of scores [V] whose maximum is 0, as `distribution` keeps it."""
    weights = np.exp(scores.astype(np.float32))  # as HF does; a third of float64's time
    return np.asarray(weights / weights.sum(dtype=np.float64), dtype=np.float64)


def _keep_top_k(scores: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """Tokens tied with the k-th are all kept, as in HF's TopKLogitsWarper."""
    place = scores.size - min(k, scores.size)
    return np.where(scores < np.partition(scores, place)[place], -np.inf, scores)


def _keep_top_p(scores: NDArray[np.float64], p: float) -> NDArray[np.float64]:
    """Drops the least likely tokens with a sum <= 1 - p; of tied tokens the lower ids go first (torch: any)."""
    kept = np.flatnonzero(scores > -np.inf)
    ascending = kept[np.argsort(scores[kept], kind="stable")]
    # Rounded to float32 where HF's are: in float64, 1 - 0.9 is less than 0.1, and exact sums fall the other way.
    tail = np.cumsum(_softmax(scores[ascending]).astype(np.float32), dtype=np.float64)
    dropped = ascending[:-1][tail[:-1].astype(np.float32) <= np.float32(1 - p)]
    filtered = scores.copy()
    filtered[dropped] = -np.inf
    return filtered


def _keep_min_p(scores: NDArray[np.float64], min_p: float) -> NDArray[np.float64]:
    """Keeps tokens at least `min_p` times as likely as the likeliest, whose score is 0 (arXiv:2407.01082)."""
    return np.where(np.exp(scores).astype(np.float32) < np.float32(min_p), -np.inf, scores)


def _top_ids(logprobs: NDArray[np.float64], k: int) -> NDArray[np.intp]:
    """Ids of the k largest, largest first, ties by lower id; sorts only the candidates."""
    k = min(k, logprobs.size)
    if k == 0:
        return np.empty(0, dtype=np.intp)
    place = logprobs.size - k
    candidates = np.flatnonzero(logprobs >= np.partition(logprobs, place)[place])
    return candidates[np.argsort(-logprobs[candidates], kind="stable")][:k]
