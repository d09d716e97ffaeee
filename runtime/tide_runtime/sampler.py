"""Choosing the next token of one sequence from its logits.

Sampled tokens are drawn by the Gumbel-max trick: the largest sum of score and noise wins, which follows the softmax of the scores
(Maddison et al. 2014, "A* Sampling"). The noise is a function of seed, position and token id (`GumbelNoise`), so a
sequence's text does not depend on other sequences, on what was drafted, or on where it was interrupted.

The filters, their order, and what they do with ties are those of `transformers.generation` (logits_process.py):
repetition penalty, temperature, top-k, top-p, min-p; each keeps at least one token. Presence and frequency penalties, biases and
a grammar's mask come after the repetition penalty.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tide_runtime.errors import BundleError, NumericsError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.gumbel_noise import GumbelNoise

FloatArray = NDArray[np.floating]
Mask = NDArray[np.bool_]
Precision = TypeVar("Precision", np.float32, np.float64)
_SLACK = 1e-5  # relative; above all rounding of top-p's sums, which are of float32 probabilities and in float64


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


class _Scratch(threading.local):
    """A float64 array for each thread: the memory of a new one is mapped page by page, which takes longer than the arithmetic."""

    def __init__(self) -> None:
        self._array = np.empty(0)

    def array(self, size: int) -> NDArray[np.float64]:
        if self._array.size != size:
            self._array = np.empty(size)
        return self._array


_scratch = _Scratch()


class Sampler:
    """Draws the tokens of one sequence.

    Args:
        params: the caller's generation parameters.
        vocab_size: length V of the logits.
        prompt_tokens: the first of the tokens ``seen``, which presence and frequency penalties leave out.
    """

    def __init__(self, params: GenerationParams, vocab_size: int, prompt_tokens: int = 0) -> None:
        self.params, self._prompt_tokens = params, prompt_tokens
        self.vocab_size = vocab_size
        self._noise = GumbelNoise(params.seed)

    def sample(self, logits: FloatArray, seen: NDArray[np.integer], allowed: Mask | None = None) -> int:
        """The token id after ``seen``: the same for the same logits, ``seen`` and seed, however often it is asked for.

        Args:
            logits: [V] float.
            seen: [S] all token ids that stand before it, prompt and output; their number is the position that the noise is for.
            allowed: [V] the tokens that a grammar allows; None: all.

        Raises:
            NumericsError: the logits hold NaN, or their maximum is infinite.
        """
        if self.params.greedy:
            return _likeliest(self._adjusted(logits, seen, allowed))
        return self._noise.winner(len(seen), self._scores(logits, seen, allowed))

    def distribution(self, logits: FloatArray, seen: NDArray[np.integer], allowed: Mask | None = None) -> NDArray[np.float64]:
        """The probabilities `sample` draws from, [V] float64, summing to 1; one-hot when greedy.

        Arguments and errors are those of `sample`.
        """
        if self.params.greedy:
            certain = np.zeros(self.vocab_size)
            certain[_likeliest(self._adjusted(logits, seen, allowed))] = 1
            return certain
        return _softmax(self._scores(logits, seen, allowed), np.float64)

    def logprobs(self, logits: FloatArray, token: int, k: int) -> TokenLogprob:
        """Log-probability of `token` and of the `k` likeliest tokens under the raw logits [V]."""
        raw = self._checked(logits)
        peak = np.float64(raw[_likeliest(raw)])
        shifted = raw.astype(np.float64) - peak
        logprobs = shifted - np.log(np.exp(shifted).sum())
        top = tuple((int(i), float(logprobs[i])) for i in _top_ids(logprobs, k))
        return TokenLogprob(token, float(logprobs[token]), top)

    def _adjusted(self, logits: FloatArray, seen: NDArray[np.integer], allowed: Mask | None) -> FloatArray:
        """Logits [V] after penalties and biases; -inf where the grammar does not allow a token."""
        raw, params = self._checked(logits), self.params
        if not params.changes_logits:
            return raw
        scores = raw.astype(np.float32)
        if params.repetition_penalty != 1 and len(seen):
            # CTRL's penalty (arXiv:1909.05858, section 4.1) as HF applies it: once per distinct id, away from likely.
            values, penalty = scores[seen], params.repetition_penalty
            scores[seen] = np.where(values < 0, values * penalty, values / penalty)
        if params.penalises_output:
            ids, counts = np.unique(seen[self._prompt_tokens :], return_counts=True)
            scores[ids] -= (params.presence_penalty + params.frequency_penalty * counts).astype(np.float32)
        for token, bias in params.logit_bias:
            scores[token] += bias
        if allowed is not None:
            _likeliest(scores)  # a NaN must not hide among the tokens that are not allowed
            scores[~allowed] = -np.inf
        return scores

    def _scores(self, logits: FloatArray, seen: NDArray[np.integer], allowed: Mask | None) -> NDArray[np.float64]:
        """Adjusted logits over the temperature [V], shifted so that the largest is 0; -inf where a filter drops a token.

        The array is this thread's, until the next call.
        """
        adjusted, params = self._adjusted(logits, seen, allowed), self.params
        best = np.float64(adjusted[_likeliest(adjusted)])
        scores = _scratch.array(self.vocab_size)
        np.subtract(adjusted, best, out=scores)
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, as it should
            scores /= params.temperature
        if params.top_k:
            _keep_top_k(scores, params.top_k)
        if params.top_p < 1:
            _keep_top_p(scores, params.top_p)
        if params.min_p > 0:
            _keep_min_p(scores, params.min_p)
        return scores

    def _checked(self, logits: FloatArray) -> FloatArray:
        if logits.shape != (self.vocab_size,):
            raise BundleError(
                f"The exit head returned logits of shape {logits.shape}, the vocabulary needs ({self.vocab_size},): "
                "the bundle's parts do not belong together; export it again."
            )
        return logits


def _likeliest(scores: FloatArray) -> int:
    """Index of the maximum, the first of equals. argmax stops at NaN, so one look at the winner checks them all."""
    best = int(np.argmax(scores))
    if not np.isfinite(scores[best]):
        raise NumericsError(
            f"The model produced {'NaN' if np.isnan(scores[best]) else 'infinite'} logits (at token {best}), expected "
            "finite ones; compare the bundle with the eager model, or build it for a target of higher precision."
        )
    return best


def _softmax(scores: NDArray[np.float64], precision: type[Precision]) -> NDArray[Precision]:
    """Softmax in ``precision`` of scores [V] whose maximum is 0."""
    weights = scores.astype(np.float32)  # as HF does; a third of float64's time
    np.exp(weights, out=weights)
    probabilities = weights if precision is np.float32 else np.empty_like(scores)
    return np.divide(weights, weights.sum(dtype=np.float64), out=probabilities)


def _keep_top_k(scores: NDArray[np.float64], k: int) -> None:
    """In place, as the other filters. Tokens tied with the k-th are all kept, as in HF's TopKLogitsWarper."""
    place = scores.size - min(k, scores.size)
    _keep(scores, np.flatnonzero(scores >= np.partition(scores, place)[place]))


def _keep_top_p(scores: NDArray[np.float64], p: float) -> None:
    """Drops the least likely tokens with a sum <= 1 - p; of tied tokens the lower ids go first (torch: any).

    A token with at most 1/K of 1 - p, of K tokens, is always dropped: itself and all less likely ones sum to no more than 1 - p.
    So only the others are sorted. Their sums are added up in another order than after sorting all; where rounding could therefore
    decide, all are sorted.
    """
    probabilities = _softmax(scores, np.float32)
    # Rounded to float32 where HF's are: in float64, 1 - 0.9 is less than 0.1, and exact sums fall the other way.
    kept, limit = np.flatnonzero(scores > -np.inf), np.float32(1 - p)
    candidates = np.flatnonzero(probabilities > (1 - _SLACK) * (1 - p) / kept.size)
    ascending, sums = _ascending_sums(scores, probabilities, candidates)
    if np.any(np.abs(sums[:-1] - limit) <= _SLACK * limit):
        ascending, sums = _ascending_sums(scores, probabilities, kept)
    _keep(scores, ascending[np.append(sums[:-1].astype(np.float32) > limit, True)])


def _ascending_sums(
    scores: NDArray[np.float64], probabilities: NDArray[np.float32], ids: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """``ids`` by ascending score, and for each the probability of itself, those before it, and all tokens not in ``ids``."""
    ascending = ids[np.argsort(scores[ids], kind="stable")]
    others = probabilities.copy()
    others[ids] = 0
    return ascending, others.sum(dtype=np.float64) + np.cumsum(probabilities[ascending], dtype=np.float64)


def _keep_min_p(scores: NDArray[np.float64], min_p: float) -> None:
    """Keeps tokens at least `min_p` times as likely as the likeliest, whose score is 0 (arXiv:2407.01082)."""
    near = np.flatnonzero(scores > np.log(min_p) - 1)  # exp of all would take longer than the rest of a draw
    _keep(scores, near[np.exp(scores[near]).astype(np.float32) >= np.float32(min_p)])


def _keep(scores: NDArray[np.float64], ids: NDArray[np.intp]) -> None:
    """Set all scores but those of ``ids`` to -inf."""
    kept = scores[ids]
    scores.fill(-np.inf)
    scores[ids] = kept


def _top_ids(logprobs: NDArray[np.float64], k: int) -> NDArray[np.intp]:
    """Ids of the k largest, largest first, ties by lower id; sorts only the candidates."""
    k = min(k, logprobs.size)
    if k == 0:
        return np.empty(0, dtype=np.intp)
    place = logprobs.size - k
    candidates = np.flatnonzero(logprobs >= np.partition(logprobs, place)[place])
    return candidates[np.argsort(-logprobs[candidates], kind="stable")][:k]
