"""Scores a given text with a depth policy: teacher forcing, one token after the other, as the policy decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from tide_runtime.sequence import TokenSequence


@dataclass(frozen=True)
class Score:
    """What a policy makes of a text, for each of its N tokens after the prompt.

    Args:
        likeliest: the policy's likeliest token there, [N].
        logprobs: natural logarithm of the probability of the text's own token, [N]; exp(-mean) is the perplexity.
        decode_s: seconds for all tokens after the first, without the bookkeeping of this function.
        layers: decoder layers launched for them.
    """

    likeliest: list[int]
    logprobs: list[float]
    decode_s: float
    layers: int


@dataclass
class ForcedSequence(TokenSequence):
    """A sequence whose next tokens are ``forced``. ``bookkeeping_s``: seconds spent on recording the policy's choices."""

    forced: Sequence[int] = ()
    likeliest: dict[int, int] = field(default_factory=dict)
    forced_logprobs: dict[int, float] = field(default_factory=dict)
    bookkeeping_s: float = 0.0

    @classmethod
    def of(cls, prompt: TokenSequence, forced: Sequence[int]) -> ForcedSequence:
        """``forced`` behind ``prompt``, a greedy sequence that may have as many new tokens."""
        given = {f.name: getattr(prompt, f.name) for f in fields(TokenSequence) if f.init and f.name != "submitted"}
        return cls(**given, forced=forced)

    def pick(self, logits: NDArray[np.floating], likeliest: int, seen: int | None = None) -> int:
        began = perf_counter()
        place = (self.num_tokens if seen is None else seen) - self.prompt_tokens
        if place == len(self.forced):  # behind a draft of the last token
            return likeliest
        token = self.forced[place]
        self.likeliest[place] = likeliest
        self.forced_logprobs[place] = float(logits[token]) - _log_sum_exp(logits)
        self.bookkeeping_s += perf_counter() - began
        return token

    def score(self) -> Score:
        """What was recorded, once the sequence is finished."""
        places = range(len(self.forced))
        decode_s = self.finished - self.first_token - self.bookkeeping_s
        return Score(
            [self.likeliest[place] for place in places],
            [self.forced_logprobs[place] for place in places],
            decode_s,
            self.layers_run,
        )


def _log_sum_exp(logits: NDArray[np.floating]) -> float:
    top = float(logits.max())
    return top + float(np.log(np.exp(logits.astype(np.float32) - top).sum(dtype=np.float64)))
