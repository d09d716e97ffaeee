"""A low-bit weight that is made when one of its parts is written, so that the weights of a model take no memory before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tide_runtime.bundle.manifest import INTEGER_PRODUCTS

from tide_export.weights.quantized_weight import QuantizedWeight

# Numbers. Values, scales and zero points are written one after the other, those of gate and up together: 136 million in a 7B.
_MAX_NUMBERS = 1 << 28


@dataclass
class RecentWeights:
    """The weights made last, for the parts that are still to be written; at most `_MAX_NUMBERS` numbers in all."""

    _weights: dict[str, QuantizedWeight] = field(default_factory=dict)

    def get(self, name: str, make: Callable[[], QuantizedWeight]) -> QuantizedWeight:
        weight = self._weights.pop(name, None) or make()
        self._weights[name] = weight
        while sum(one.values.size for one in self._weights.values()) > _MAX_NUMBERS:
            del self._weights[next(iter(self._weights))]
        return weight


@dataclass(frozen=True)
class DeferredWeight:
    """The form of a `QuantizedWeight`, and ``make``, which makes it.

    Raises ValueError where the weight that was made has another form.
    """

    bits: int
    shape: tuple[int, int]
    block_size: int
    has_zero_points: bool
    has_offsets: bool
    origin: str
    make: Callable[[], QuantizedWeight]
    smoothing: NDArray[np.float32] | None = None

    def materialize(self) -> QuantizedWeight:
        weight = self.make()
        form = ("bits", "shape", "block_size", "has_zero_points", "has_offsets")
        if any(getattr(weight, name) != getattr(self, name) for name in form):
            raise ValueError(f"a weight of {weight.shape}, {weight.bits} bits, expected {self.shape}, {self.bits} bits")
        return weight


LowBits = QuantizedWeight | DeferredWeight


def deferred(like: QuantizedWeight, shape: tuple[int, int], make: Callable[[], QuantizedWeight]) -> DeferredWeight:
    """A weight of ``shape`` in the form of ``like``."""
    form = (like.block_size, like.has_zero_points, like.has_offsets, like.origin)
    return DeferredWeight(like.bits, shape, *form, make)


def deferred_integer(
    shape: tuple[int, int], smoothing: NDArray[np.float32], make: Callable[[], QuantizedWeight]
) -> DeferredWeight:
    """The weight of an integer product, see `QuantizedWeight.smoothing`."""
    return DeferredWeight(8, shape, shape[1], False, False, INTEGER_PRODUCTS, make, smoothing)
