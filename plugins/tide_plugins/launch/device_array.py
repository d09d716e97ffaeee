"""Tensors in device memory, by their pointers."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

# Type names of the kernels' entry points; bool is a byte of 0 or 1.
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4, "i64": 8, "u64": 8, "u8": 1}


@dataclass(frozen=True)
class DeviceArray:
    """A tensor in device memory, which must outlive every launch that uses it.

    Args:
        pointer: device address.
        shape: elements per dimension.
        dtype: a key of `ITEM_BYTES`.
        device: the GPU's ordinal.
        strides: elements from one index to the next, per dimension; None: C-contiguous.
        writable: whether a kernel may write to it.
        owner: object that is kept alive with this one.
    """

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    device: int = 0
    strides: tuple[int, ...] | None = None
    writable: bool = True
    owner: Any = None

    @property
    def element_strides(self) -> tuple[int, ...]:
        if self.strides is not None:
            return self.strides
        return tuple(prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))
