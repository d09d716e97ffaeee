"""Backoff of speculation: a running speedup, and cooldowns after speculation has lost, longer each time."""

from __future__ import annotations

from dataclasses import dataclass, field

from tide_runtime.depth_tuning import DepthTuning

_DECAY = 0.9  # share of the past that the running speedup keeps at each outcome


@dataclass
class Backoff:
    """The record of one kind of speculation in one sequence. Costs are in full-depth decode steps of one token.

    Args:
        expected: the speedup expected at first and after a cooldown.
        weight: outcomes that the expectation counts as.
    """

    tuning: DepthTuning
    expected: float
    weight: float = 1.0
    tokens: float = field(init=False)
    cost: float = field(init=False)
    cooldown: float = 0  # tokens until speculation is tried again
    next_cooldown: int = field(init=False)

    def __post_init__(self) -> None:
        self.next_cooldown = self.tuning.cooldown
        self._expect()

    @property
    def active(self) -> bool:
        """Whether speculation is tried now."""
        return self.cooldown == 0

    @property
    def speedup(self) -> float:
        """Tokens over those that full-depth decoding makes in the same time; 1 during a cooldown."""
        return self.tokens / self.cost if self.active else 1.0

    def observe(self, tokens: float, cost: float) -> None:
        """Speculation gave ``tokens`` for ``cost``."""
        tuning = self.tuning
        self.tokens, self.cost = _DECAY * self.tokens + tokens, _DECAY * self.cost + cost
        if self.tokens < self.cost:
            self.cooldown = self.next_cooldown
            self.next_cooldown = min(2 * self.next_cooldown, tuning.longest_cooldown)
            self._expect()
        elif self.tokens > tuning.uncalibrated_speedup * self.cost:
            self.next_cooldown = tuning.cooldown

    def pass_tokens(self, tokens: float) -> None:
        """``tokens`` were generated without speculation."""
        self.cooldown = max(0.0, self.cooldown - tokens)

    def _expect(self) -> None:
        self.tokens, self.cost = self.weight * self.expected, self.weight


def exit_backoff(tuning: DepthTuning) -> Backoff:
    """The record of policy ``exit``, which observes every token."""
    return Backoff(tuning, tuning.uncalibrated_speedup, tuning.exit_expectation_weight)
