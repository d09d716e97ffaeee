"""Requests of a load: windows of one text in the lengths that are asked for, and the times at which they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from tide_bench.load import Request


@dataclass(frozen=True)
class LengthMix:
    """Ranges of lengths in tokens, both ends included: prompts are drawn log-uniformly, new tokens uniformly.

    Raises ValueError for a range that is empty or starts below 1.
    """

    prompt: tuple[int, int]
    new: tuple[int, int]

    def __post_init__(self) -> None:
        for name, (low, high) in (("prompt", self.prompt), ("new", self.new)):
            if not 1 <= low <= high:
                raise ValueError(f"the range of {name} tokens is {low} to {high}; give 1 <= low <= high")

    def draw(self, count: int, random: np.random.Generator) -> list[tuple[int, int]]:
        """``count`` pairs (prompt tokens, new tokens)."""
        low, high = self.prompt
        prompts = np.floor(np.exp(random.uniform(np.log(low), np.log(high + 1), count))).clip(low, high)
        return list(zip(prompts.astype(int).tolist(), random.integers(self.new[0], self.new[1] + 1, count).tolist(), strict=True))


def requests(text: Sequence[int], mix: LengthMix, count: int, seed: int | Sequence[int]) -> list[Request]:
    """``count`` requests that arrive at once. Their prompts begin at random places of ``text`` (token ids), so that no two of
    them share a prefix. Raises ValueError when the text is too short for that."""
    random = np.random.default_rng(seed)
    last = len(text) - mix.prompt[1]
    if last < count:
        raise ValueError(f"the text has {len(text)} tokens; {count} prompts of up to {mix.prompt[1]} need more, ask for fewer")
    starts = random.choice(last, count, replace=False).tolist()
    lengths = mix.draw(count, random)
    return [Request(0.0, list(text[s : s + tokens]), new) for s, (tokens, new) in zip(starts, lengths, strict=True)]


def with_arrivals(planned: Sequence[Request], rate: float, seed: int) -> list[Request]:
    """The same requests, arriving as a Poisson process of ``rate`` requests/s; the first one arrives at 0 s."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(planned))
    arrivals = np.cumsum(gaps) - gaps[0]
    return [replace(request, arrival_s=float(at)) for request, at in zip(planned, arrivals, strict=True)]
