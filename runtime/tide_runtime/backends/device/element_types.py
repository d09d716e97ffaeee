"""Element types of graph tensors: manifest name, ONNX type number, and NumPy dtype on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tide_runtime.errors import BundleError


@dataclass(frozen=True)
class ElementType:
    """``onnx``: value in TensorProto.DataType. ``host``: NumPy dtype; bf16, which NumPy lacks, is held as uint16 bits."""

    name: str
    onnx: int
    host: DTypeLike

    @property
    def bytes(self) -> int:
        return np.dtype(self.host).itemsize

    def widened(self, bits: NDArray[np.generic]) -> NDArray[np.generic]:
        """Host values as numbers: bf16 bits, the upper half of fp32, become float32."""
        if self.name != "bf16":
            return bits
        return (bits.astype(np.uint32) << 16).view(np.float32)

    def narrowed(self, values: NDArray[np.generic]) -> NDArray[np.generic]:
        """The inverse of `widened`; numbers that bf16 does not have lose their last bits."""
        if self.name != "bf16" or values.dtype == self.host:
            return np.asarray(values, self.host)
        return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


FP32, FP16, BF16 = ElementType("fp32", 1, np.float32), ElementType("fp16", 10, np.float16), ElementType("bf16", 16, np.uint16)
INT64, INT32, INT8 = ElementType("int64", 7, np.int64), ElementType("int32", 6, np.int32), ElementType("int8", 3, np.int8)
ELEMENT_TYPES = {kind.name: kind for kind in (FP32, FP16, BF16, INT64, INT32, INT8)}


def element_type(name: str, where: str) -> ElementType:
    """The type named ``name`` in the manifest. Raises BundleError, which mentions ``where``, for an unsupported type."""
    if name not in ELEMENT_TYPES:
        raise BundleError(f"{where} has elements of type {name}, expected one of {', '.join(ELEMENT_TYPES)}; export again")
    return ELEMENT_TYPES[name]
