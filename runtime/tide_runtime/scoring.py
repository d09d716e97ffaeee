"""Scores a given text with a depth policy: teacher forcing, one token after the other, as the policy decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.base import ExecutionContext
from tide_runtime.depth.policy import DepthPolicy
from tide_runtime.scheduler import run
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
class _ForcedSequence(TokenSequence):
    """A sequence whose next tokens are ``forced``. ``bookkeeping_s``: seconds spent on recording the policy's choices."""

    forced: Sequence[int] = ()
    likeliest: list[int] = field(default_factory=list)
    forced_logprobs: list[float] = field(default_factory=list)
    bookkeeping_s: float = 0.0

    def pick(self, logits: NDArray[np.floating], likeliest: int, seen: int | None = None) -> int:
        began = perf_counter()
        token = self.forced[self.num_tokens - self.prompt_tokens]
        self.likeliest.append(likeliest)
        self.forced_logprobs.append(float(logits[token]) - _log_sum_exp(logits))
        self.bookkeeping_s += perf_counter() - began
        return token


def score_text(policy: DepthPolicy, context: ExecutionContext, prompt: TokenSequence, forced: Sequence[int]) -> Score:
    """Let ``policy`` read ``forced`` behind ``prompt``, a greedy sequence that may have as many new tokens."""
    given = {f.name: getattr(prompt, f.name) for f in fields(TokenSequence) if f.init and f.name != "submitted"}
    sequence = _ForcedSequence(**given, forced=forced)
    for _ in run(policy, context, [sequence]):
        pass
    decode_s = sequence.finished - sequence.first_token - sequence.bookkeeping_s
    return Score(sequence.likeliest, sequence.forced_logprobs, decode_s, sequence.layers_run)


def _log_sum_exp(logits: NDArray[np.floating]) -> float:
    top = float(logits.max())
    return top + float(np.log(np.exp(logits.astype(np.float32) - top).sum(dtype=np.float64)))
