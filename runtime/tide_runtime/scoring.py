"""Scores a given text with a depth policy (teacher forcing): in prompt passes, or one token after the other as it decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from tide_runtime.errors import EngineClosedError
from tide_runtime.sequence import TokenSequence


@dataclass(frozen=True)
class Score:
    """What a policy makes of a text, for each of its N tokens after the prompt.

    Args:
        argmax: the policy's likeliest token there, [N].
        logprobs: natural logarithm of the probability of the text's own token, [N]; exp(-mean) is the perplexity.
        top: (token, log-probability) of the likeliest tokens at each place, [N], where some were wanted.
        decode_s: seconds for all tokens after the first, without the bookkeeping of this function; 0 in prompt passes.
        layers: decoder layers launched for them; 0 in prompt passes.
    """

    argmax: list[int]
    logprobs: list[float]
    decode_s: float
    layers: int
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)


@dataclass
class ForcedSequence(TokenSequence):
    """A text whose last tokens are ``forced``; records the ``num_top`` likeliest tokens at the place of each.

    They are generated one after the other, or all but the last belong to the prompt, whose logits are then read too.

    Args:
        bookkeeping_s: seconds spent on recording the policy's choices.
    """

    forced: Sequence[int] = ()
    num_top: int = 0
    top: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    argmax: dict[int, int] = field(default_factory=dict)
    forced_logprobs: dict[int, float] = field(default_factory=dict)
    bookkeeping_s: float = 0.0

    @classmethod
    def of(cls, prompt: TokenSequence, forced: Sequence[int], num_top: int = 0) -> ForcedSequence:
        """The text of the greedy sequence ``prompt`` and its new tokens, which ends with ``forced``."""
        given = {f.name: getattr(prompt, f.name) for f in fields(TokenSequence)}
        return cls(**given, forced=forced, num_top=num_top)

    @property
    def scored_from(self) -> int:
        """The place of the first forced token in the text."""
        return len(self.tokens) - len(self.forced)

    @property
    def is_long_text(self) -> bool:
        """The whole text counts, as in one pass of the model over it."""
        return self.long_rotary_from is not None and len(self.tokens) > self.long_rotary_from

    @property
    def logits_from(self) -> int:
        return self.scored_from - 1 if self.num_tokens == self.prompt_tokens else self.prefill_end

    def pick(self, logits: NDArray[np.floating], argmax: int, seen: int | None = None) -> int:
        began = perf_counter()
        place = (self.num_tokens if seen is None else seen) - self.scored_from
        if place == len(self.forced):  # after a draft of the last token
            return argmax
        token, logits = self.forced[place], np.asarray(logits)  # from a device, too
        self.argmax[place] = argmax
        self.forced_logprobs[place] = float(logits[token]) - _log_sum_exp(logits)
        if self.num_top:
            self.top[place] = self.sampler.logprobs(np.asarray(logits, np.float32), token, self.num_top).top
        self.bookkeeping_s += perf_counter() - began
        return token

    def score(self) -> Score:
        """What was recorded, once the sequence is finished. Raises EngineClosedError where it ended before the text did."""
        if len(self.argmax) < len(self.forced):
            raise EngineClosedError("the text was not scored to its end, as the request was cancelled; send it again")
        places = range(len(self.forced))
        decode_s = max(0.0, self.history.finished - self.history.first_token - self.bookkeeping_s)
        return Score(
            [self.argmax[place] for place in places],
            [self.forced_logprobs[place] for place in places],
            decode_s,
            self.depth.layers_run,
            [self.top[place] for place in places] if self.num_top else [],
        )


def _log_sum_exp(logits: NDArray[np.floating]) -> float:
    top = float(logits.max())
    return top + float(np.log(np.exp(logits.astype(np.float32) - top).sum(dtype=np.float64)))
