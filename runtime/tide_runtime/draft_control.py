"""How a row's drafting adapts: which drafter is worth its cost just now, and how far ahead it should go.

Every drafter is judged by tokens per modelled cost against plain decoding. The n-gram drafter can be judged without
being used (its guess is compared with what came), so it is taken up as soon as the text repeats. The router cannot: when
its drafts stop paying it rests for a while, longer each time, and is then tried again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tide_runtime.ngram import NgramDrafter
from tide_runtime.step_costs import StepCosts

_WEIGHT = 0.1  # of the newest cycle in a running mean
_SHORT_REST, _LONG_REST = 32, 512  # tokens


@dataclass
class DraftControl:
    """The state of one row."""

    costs: StepCosts
    rows: int
    limit: int
    ngram: NgramDrafter = field(default_factory=NgramDrafter)
    hit_rate: float = 0.5  # of n-gram guesses, per token
    router_gain: float = 1.1  # tokens over what plain decoding would have made in the same time
    resting: int = 0  # tokens until the router is tried again
    next_rest: int = _SHORT_REST

    def ngram_length(self) -> int:
        """Drafts to copy for the best expected rate; 0 when plain decoding, or the router, does better."""
        best, best_gain = 0, self.router_gain if self.resting == 0 else 1.0
        expected, chance, single = 1.0, 1.0, self.costs.full(self.rows, 1)
        for length in range(1, self.limit + 1):
            chance *= self.hit_rate
            expected += chance
            gain = expected * single / self.costs.full(self.rows, length + 1)
            if gain > best_gain:
                best, best_gain = length, gain
        return best

    def saw_ngram(self, hits: int, missed: bool) -> None:
        """A guess had ``hits`` right tokens before the first wrong one (``missed``) or its end."""
        for _ in range(hits):
            self.hit_rate += _WEIGHT * (1.0 - self.hit_rate)
        if missed:
            self.hit_rate -= _WEIGHT * self.hit_rate

    def saw_router(self, tokens: int, cost: float) -> None:
        """A cycle of router drafts gave ``tokens`` for ``cost``."""
        gain = tokens * self.costs.full(self.rows, 1) / cost
        self.router_gain += _WEIGHT * (gain - self.router_gain)
        if self.router_gain < 1.0:
            self.resting, self.next_rest = self.next_rest, min(2 * self.next_rest, _LONG_REST)
            self.router_gain = 1.0 + _WEIGHT  # a fresh chance when it is tried again
        elif self.router_gain > 1.0 + 2 * _WEIGHT:
            self.next_rest = _SHORT_REST

    def rest(self, tokens: int) -> None:
        """``tokens`` were made without the router."""
        self.resting = max(0, self.resting - tokens)
