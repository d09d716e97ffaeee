"""Reading a text with a depth policy: at every place the policy answers, and the text goes on regardless.

So answers of different policies are about the same text before them, as the certificate's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from tide_runtime import Engine, GenerationParams
from tide_runtime.scheduler import run
from tide_runtime.sequence import TokenSequence


@dataclass(frozen=True)
class Reading:
    """What a policy made of one text.

    Args:
        answers: its likeliest token at every place after the prompt's first one, [N].
        nats: -log of the probability that it gave the text's own token there, [N]; exp of their mean is the perplexity.
        decode_s: seconds for these N tokens.
        layers: decoder layers launched for them.
    """

    answers: list[int]
    nats: list[float]
    decode_s: float
    layers: int


@dataclass
class _ForcedRow(TokenSequence):
    """A sequence whose tokens are those of ``forced``. ``bookkeeping``: seconds spent on noting answers."""

    forced: Sequence[int] = ()
    answers: list[int] = field(default_factory=list)
    nats: list[float] = field(default_factory=list)
    bookkeeping: float = 0.0

    def pick(self, logits: NDArray[np.floating], likeliest: int, seen: int | None = None) -> int:
        begin = perf_counter()
        token = self.forced[self.num_tokens - self.prompt_tokens]
        self.answers.append(likeliest)
        self.nats.append(_log_sum_exp(logits) - float(logits[token]))
        self.bookkeeping += perf_counter() - begin
        return token


def read_text(engine: Engine, text: Sequence[int], prompt_tokens: int) -> Reading:
    """Read ``text`` with the engine's policy, which must be ``full`` or ``exit``: ``exact`` would draft what the text is not."""
    row = _forced_row(engine, text, prompt_tokens)
    with engine._lease_context(1) as context:
        for _ in run(engine.policy, context, [row]):
            pass
    return Reading(row.answers[1:], row.nats[1:], row.finished - row.first_token - row.bookkeeping, row.layers_run)


def logits_gap(engine: Engine, text: Sequence[int], one: int, other: int) -> float:
    """Distance of two tokens' logits behind ``text``, by the engine's policy."""
    nats = []
    for token in (one, other):
        row = _forced_row(engine, [*text, token], len(text))
        with engine._lease_context(1) as context:
            for _ in run(engine.policy, context, [row]):
                pass
        nats.append(row.nats[0])
    return abs(nats[0] - nats[1])


def _forced_row(engine: Engine, text: Sequence[int], prompt_tokens: int) -> _ForcedRow:
    params = GenerationParams(max_new_tokens=len(text) - prompt_tokens, ignore_eos=True)
    plain = engine._make_sequence(0, list(text[:prompt_tokens]), params)
    given = {f.name: getattr(plain, f.name) for f in fields(TokenSequence) if f.init and f.name != "submitted"}
    return _ForcedRow(**given, forced=text[prompt_tokens:])


def _log_sum_exp(logits: NDArray[np.floating]) -> float:
    top = float(logits.max())
    return top + float(np.log(np.exp(logits.astype(np.float32) - top).sum(dtype=np.float64)))
