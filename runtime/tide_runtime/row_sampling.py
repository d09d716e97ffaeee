"""What a device finds in a row of logits, so that drawing a token reads a few hundred of them and not the vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class LargestLogits(NamedTuple):
    """The largest logits of a row, in any order; of those tied with the least, any.

    Attributes:
        ids: [n] int32.
        values: [n] float32.
        others: probability of all other tokens, relative to the likeliest, at the temperature.
    """

    ids: NDArray[np.int32]
    values: NDArray[np.float32]
    others: float


class RaceLeaders(NamedTuple):
    """Tokens that can win `tide_runtime.gumbel_noise`'s race, in any order.

    Attributes:
        ids: [n] int32.
        values: [n] float32, their logits.
        best: the row's largest logit.
        least_of_others: least bound of all other tokens, see `GumbelNoise.leader`.
    """

    ids: NDArray[np.int32]
    values: NDArray[np.float32]
    best: np.float32
    least_of_others: float


class RowSampling(Protocol):
    """A device's functions over rows of logits. ``pointer``: address of a row. They synchronise."""

    def largest(self, pointer: int, temperature: float) -> LargestLogits:
        """The row's largest logits."""

    def race(self, pointer: int, temperature: float, key: NDArray[np.uint64], position: int) -> RaceLeaders | None:
        """The tokens of the row with the least (1 - u) / w; ``key`` [2] is that of the noise. None: the device draws no noise."""


class RowOnDevice(Protocol):
    """A row of logits [V] in a device's memory. ``sampling``: None where tokens are drawn on the host."""

    @property
    def pointer(self) -> int: ...

    @property
    def sampling(self) -> RowSampling | None: ...

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """A copy on the host."""
