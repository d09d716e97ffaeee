"""A bound on what drafts lose: a sequence's account of the passes that drafts cost and the tokens that they gave.

Expected gains are right on average, and a short reply may be unlucky all the way. Drafts are verified only while the account
can pay for all of them being wrong, so that they lose no more than what it is given: see `DepthTuning.loss_allowance`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tide_runtime.depth_tuning import DepthTuning


@dataclass
class Ledger:
    """``balance``: passes through the whole model, each of which gives a token without drafts, that drafts may still lose."""

    tuning: DepthTuning
    balance: float = field(init=False)

    def __post_init__(self) -> None:
        self.balance = self.tuning.loss_allowance

    def settle(self, tokens: int, cost: float, right: int) -> None:
        """A step gave ``tokens``, ``right`` of them drafts, and took ``cost`` passes more than without drafts."""
        self.balance += self.tuning.loss_share * tokens + right - cost
