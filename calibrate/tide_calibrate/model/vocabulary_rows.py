"""The LM head's product for chosen tokens alone; what the model does around it (norm, soft-cap, scaling) stays its own code."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn import functional as F


class VocabularyRows(nn.Module):
    """Stands in for the output embedding ``linear``: all of its rows, or those that the calling thread has chosen.

    Heads that share a model are trained in several threads, so the choice is thread-local.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self._chosen = threading.local()  # .ids

    @property
    def weight(self) -> Tensor:
        """[V, H]; some models read its dtype."""
        return self.linear.weight

    @property
    def bias(self) -> Tensor | None:
        return self.linear.bias

    @contextmanager
    def only(self, ids: Tensor | None) -> Iterator[None]:
        """Within the context, compute logits of the tokens ``ids`` [n] alone, in their order; None: of all."""
        self._chosen.ids = ids
        try:
            yield
        finally:
            self._chosen.ids = None

    def forward(self, states: Tensor) -> Tensor:
        ids: Tensor | None = getattr(self._chosen, "ids", None)
        if ids is None:
            return self.linear(states)
        return F.linear(states, self.weight[ids], None if self.bias is None else self.bias[ids])
