"""How many prompt tokens share a step with decodes, so that a long prompt does not stall the others' tokens."""

from __future__ import annotations

from functools import cache

from tide_runtime.costs.cost_model import CostModel

_MOST_SLOWDOWN = 2.5  # of a step by the prompts in it; steps with many decodes take longer than the median one besides
_LEAST_TOKENS = 16  # that prompts get in any case; budgets are multiples


class StepBudget:
    """Prompt tokens of a step by the number of requests that decode in it, from the cost model.

    Args:
        most: prompt tokens of a step in which nothing decodes.
        shared: prompts and decodes share a launch. Otherwise each prompt has a launch of its own, of ``most`` tokens.
    """

    def __init__(self, costs: CostModel, most: int, shared: bool) -> None:
        self._costs, self._most, self._shared = costs, most, shared
        self.tokens = cache(self._tokens)

    def __call__(self, decoding: int) -> int:
        return self.tokens(decoding) if decoding and self._shared else self._most

    def _tokens(self, decoding: int) -> int:
        bound = _MOST_SLOWDOWN * self._costs.packed(decoding, decoding, 0)
        tokens = _LEAST_TOKENS
        while tokens < self._most and self._costs.packed(decoding, decoding, tokens + _LEAST_TOKENS) <= bound:
            tokens += _LEAST_TOKENS
        return min(self._most, tokens)
