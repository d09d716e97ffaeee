"""In how many bits the inputs of integer products are rounded: 8 where this processor's products are exact with them, else 7.

Processors without VNNI (AVX2, AVX512 before Cascade Lake) add two products of a byte and a signed byte in 16 bits: 255 · 127 · 2
does not fit, 127 · 127 · 2 does. A graph reads the step of the rounding and its zero point from two initializers, which a session
takes from here; everything else is the same in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tide_runtime.backends.onnxruntime.model_proto import integer_product

STEP, ZERO_POINT = "activations.step", "activations.zero_point"  # initializers of graphs with integer products
_ROWS = (1, 2, 4, 17)  # kernels differ by the number of rows


@dataclass(frozen=True)
class ActivationBits:
    """How a share x / max |x| in [-1, 1] becomes an unsigned integer of ``bits``."""

    bits: int

    @property
    def step(self) -> NDArray[np.float32]:
        return np.array(1 / ((1 << self.bits - 1) - 1), np.float32)

    @property
    def zero_point(self) -> NDArray[np.uint8]:
        return np.array(1 << self.bits - 1, np.uint8)


EIGHT, SEVEN = ActivationBits(8), ActivationBits(7)


@cache
def activation_bits(shared: bool = False) -> ActivationBits:
    """Those of this processor, by the largest products of every kernel's rows. ``shared``: see `ThreadOptions`."""
    matrix = np.full((64, 32), 127, np.int8)
    options = ort.SessionOptions()
    options.use_per_session_threads = not shared
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # which would compute it by other kernels
    for count in _ROWS:
        rows = np.full((count, 64), 255, np.uint8)
        session = ort.InferenceSession(integer_product(rows, matrix), options, providers=["CPUExecutionProvider"])
        if (session.run(None, {})[0] != 64 * 255 * 127).any():
            return SEVEN
    return EIGHT


def set_activation_bits(options: ort.SessionOptions) -> None:
    """Let a session with ``options``, whose graph rounds to 8 bits, round to those of this processor."""
    if activation_bits(shared=not options.use_per_session_threads) is SEVEN:
        for name, value in _SEVEN_BITS.items():
            options.add_initializer(name, value)


# A session reads them as long as it lives.
_SEVEN_BITS = {n: ort.OrtValue.ortvalue_from_numpy(v) for n, v in ((STEP, SEVEN.step), (ZERO_POINT, SEVEN.zero_point))}
