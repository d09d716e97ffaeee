"""Verify drafts with the model's own logits: an accepted draft is the token that the model would have generated.

Greedy or sampled, a draft is accepted when it is the token that the sequence chooses from the model's logits. A sampled token is
a function of the logits, the seed and the position (`Sampler`), so the text does not depend on what was drafted. Exit heads draft
with the same noise, hence often the same token (coupling without communication: Daliri et al. 2024, arXiv:2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tide_runtime.backends.base import Logits
from tide_runtime.sequence import TokenSequence


class Draft(NamedTuple):
    """A proposed token; ``source``: "router" for one that an exit head chose after ``depth`` layers, "ngram" for a copied one,
    "grammar" for one that a grammar forces, "head" for the draft head's."""

    token: int
    source: str
    depth: int


def verify(sequence: TokenSequence, drafts: Sequence[Draft], verified: Logits) -> tuple[list[int], int]:
    """The sequence's next output tokens and how many of ``drafts`` are among them.

    ``verified`` holds the model's logits after the last output token and after each draft; the drafts stand in
    ``sequence.tokens`` behind ``sequence.num_tokens``. Accepted drafts are followed by one token of the model's own.
    """
    tokens: list[int] = []
    for place in range(len(drafts) + 1):
        token = sequence.choose(verified.logits[place], verified.tokens[place], sequence.num_tokens + place)
        tokens.append(token)
        if place == len(drafts) or token != drafts[place].token:
            break
    return tokens, place
