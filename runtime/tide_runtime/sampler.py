"""Choosing the next token of one sequence from its logits.

Sampled tokens are drawn by the Gumbel-max trick: the largest sum of score and noise wins, which follows the softmax of the scores
(Maddison et al. 2014, "A* Sampling"). The noise is a function of seed, position and token id (`GumbelNoise`), so a
sequence's text does not depend on other sequences, on what was drafted, or on where it was interrupted.

The order is that of `transformers.generation`: repetition penalty, temperature, top-k, top-p, min-p (`filter_tokens`). Presence
and frequency penalties, biases and a grammar's mask come after the repetition penalty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tide_runtime.errors import BundleError, NumericsError
from tide_runtime.generation_params import GenerationParams
from tide_runtime.gumbel_noise import GumbelNoise
from tide_runtime.sampling_filters import filter_tokens, weights

FloatArray = NDArray[np.floating]
Mask = NDArray[np.bool_]


class RowSampling(Protocol):
    """Draws tokens from logits in a device's memory."""

    def choose(self, pointer: int, samplers: Sequence[Sampler], positions: Sequence[int]) -> list[int]:
        """The tokens that ``samplers`` give at ``positions`` for rows that stand one after the other from address ``pointer`` on,
        before penalties, biases and grammars; -1: the row has to be read. Synchronizes."""


class RowOnDevice(Protocol):
    """A row of logits [V] in a device's memory. ``sampling``: None where tokens are drawn on the host."""

    @property
    def pointer(self) -> int: ...

    @property
    def sampling(self) -> RowSampling | None: ...

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """A copy on the host."""


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

    @property
    def key(self) -> NDArray[np.uint64]:
        """[2] of the noise."""
        return self._noise.key

    def sample(self, logits: FloatArray | RowOnDevice, seen: NDArray[np.integer], allowed: Mask | None = None) -> int:
        """The token id after ``seen``: the same for the same logits, ``seen`` and seed, however often it is asked for.

        Args:
            logits: [V] float; a row in a device's memory is copied to the host only where the device leaves the token to it.
            seen: [S] all token ids that stand before it, prompt and output; their number is the position that the noise is for.
            allowed: [V] the tokens that a grammar allows; None: all.

        Raises:
            NumericsError: the logits hold NaN, or their maximum is infinite.
        """
        if not (self.params.greedy or self.params.changes_logits or isinstance(logits, np.ndarray) or logits.sampling is None):
            [token] = logits.sampling.choose(logits.pointer, [self], [len(seen)])
            if token >= 0:
                return token
        row = np.asarray(logits, np.float32)
        if self.params.greedy:
            return _likeliest(self._adjusted(row, seen, allowed))
        values = self._values(row, seen, allowed)
        kept = filter_tokens(values, self.params)
        return self._noise.winner(len(seen), values if kept is None else values[kept], self.params.temperature, kept)

    def distribution(self, logits: FloatArray, seen: NDArray[np.integer], allowed: Mask | None = None) -> NDArray[np.float64]:
        """The probabilities `sample` draws from, [V] float64, summing to 1; one-hot when greedy.

        Arguments and errors are those of `sample`.
        """
        probabilities = np.zeros(self.vocab_size)
        if self.params.greedy:
            probabilities[_likeliest(self._adjusted(logits, seen, allowed))] = 1
            return probabilities
        values = self._values(logits, seen, allowed)
        kept = filter_tokens(values, self.params)
        ids = np.arange(self.vocab_size) if kept is None else kept
        relative = weights(values[ids], self.params.temperature, values.max())
        probabilities[ids] = relative / relative.sum(dtype=np.float64)
        return probabilities

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
        raw = self._checked(logits)
        params = self.params
        if not params.changes_logits:
            return raw
        scores = raw.astype(np.float32)
        if params.repetition_penalty != 1 and len(seen):
            # CTRL's penalty (arXiv:1909.05858, section 4.1) as HF applies it: once per distinct id, away from likely.
            values = scores[seen]
            penalty = params.repetition_penalty
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

    def _values(self, logits: FloatArray, seen: NDArray[np.integer], allowed: Mask | None) -> NDArray[np.float32]:
        """Adjusted logits [V], whose maximum is finite."""
        values = self._adjusted(logits, seen, allowed).astype(np.float32, copy=False)
        _likeliest(values)
        return values

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


def _top_ids(logprobs: NDArray[np.float64], k: int) -> NDArray[np.intp]:
    """Ids of the k largest, largest first, ties by lower id; sorts only the candidates."""
    k = min(k, logprobs.size)
    if k == 0:
        return np.empty(0, dtype=np.intp)
    place = logprobs.size - k
    candidates = np.flatnonzero(logprobs >= np.partition(logprobs, place)[place])
    return candidates[np.argsort(-logprobs[candidates], kind="stable")][:k]
