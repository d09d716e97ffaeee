"""Whether a gamble pays: tokens it gave over what it cost, both fading with time. When it loses it rests, longer each time."""

from __future__ import annotations

from dataclasses import dataclass, field

_KEPT = 0.9  # of the past, at each outcome
_SHORT_REST, _LONG_REST = 32, 512  # tokens
_LONGER, _NEVER_WON = 2, 4  # times, the next rest after a loss: of who has won before, of who never has
_FIRST, _AGAIN = 2.0, 1.0  # how much the expectation weighs at the start, and after a rest
BENEFIT_OF_DOUBT = 1.1  # the gain expected of a gamble that nobody has calibrated


@dataclass
class Trial:
    """One row's record of asking exits. Costs are in units of plain decoding of one token.

    Args:
        expected: the gain at first.
    """

    expected: float = BENEFIT_OF_DOUBT
    tokens: float = field(init=False)
    cost: float = field(init=False)
    resting: float = 0  # tokens until it is tried again
    next_rest: int = _SHORT_REST
    won: bool = False  # ever

    def __post_init__(self) -> None:
        self._expect(_FIRST)

    @property
    def gain(self) -> float:
        """Tokens over those that plain decoding would have made in the same time; 1 while it rests."""
        return self.tokens / self.cost if self.asks else 1.0

    @property
    def asks(self) -> bool:
        """Whether it is tried now."""
        return self.resting == 0

    def saw(self, tokens: float, cost: float) -> None:
        """A try gave ``tokens`` for ``cost``."""
        self.tokens, self.cost = _KEPT * self.tokens + tokens, _KEPT * self.cost + cost
        self.won |= tokens > cost
        if self.tokens < self.cost:
            longer = _LONGER if self.won else _NEVER_WON
            self.resting, self.next_rest = self.next_rest, min(longer * self.next_rest, _LONG_REST)
            self._expect(_AGAIN)
        elif self.tokens > BENEFIT_OF_DOUBT * self.cost:
            self.next_rest = _SHORT_REST

    def _expect(self, weight: float) -> None:
        self.tokens, self.cost = weight * self.expected, weight

    def rest(self, tokens: float) -> None:
        """``tokens`` were made without it."""
        self.resting = max(0.0, self.resting - tokens)
