"""Reading a text with a depth policy: at every place the policy answers, and the text goes on regardless.

So answers of different policies are about the same text before them, as the certificate's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tide_runtime import Engine


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


def read_text(engine: Engine, text: Sequence[int], prompt_tokens: int) -> Reading:
    """Read ``text`` with the engine's policy. The first token after the prompt is left out: the prompt's full pass gives it."""
    (score,) = engine.score_many([(text, prompt_tokens)], decode=True)
    return Reading(score.likeliest[1:], [-logprob for logprob in score.logprobs[1:]], score.decode_s, score.layers)


def logits_gap(engine: Engine, text: Sequence[int], one: int, other: int) -> float:
    """Distance of two tokens' logits behind ``text``, by the engine's policy."""
    first, second = (engine.score([*text, token], len(text)).logprobs[0] for token in (one, other))
    return abs(first - second)
