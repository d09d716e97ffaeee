"""Tensors in device memory from DLPack, ``__cuda_array_interface__``, or a raw pointer."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from tide_runtime.errors import ParamsError

# Type names of the kernels' entry points; bool is a byte of 0 or 1.
ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4, "i64": 8, "u64": 8, "u8": 1}
_NAMES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int32": "i32",
    "int64": "i64",
    "uint64": "u64",
    "uint8": "u8",
    "bool": "u8",
}
_DLPACK_CPU = 1  # kDLCPU


@dataclass(frozen=True)
class DeviceArray:
    """A tensor in device memory. Constructed from a raw pointer, its memory must outlive every launch that uses it.

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


def device_array(value: Any, stream: int) -> DeviceArray:
    """``value`` as a `DeviceArray`, without a copy.

    Work that the owner has queued on other streams is ordered before later work on ``stream``, as DLPack and the CUDA array
    interface (version 3) specify.

    Args:
        value: a `DeviceArray`, or anything with ``__dlpack__`` or ``__cuda_array_interface__``.
        stream: handle of the stream that will use it.

    Raises:
        ParamsError: it is none of these, is in host memory, or has an element type that no kernel supports.
    """
    if isinstance(value, DeviceArray):
        return value
    view = _view(value, stream)
    name = str(view.dtype)
    if name not in _NAMES:
        raise ParamsError(f"the {type(value).__name__} has dtype {name}; kernels take {', '.join(_NAMES)}")
    strides = None if view.strides is None else tuple(view.strides)
    return DeviceArray(view.ptr, tuple(view.shape), _NAMES[name], view.device_id, strides, not view.readonly, owner=view)


def _view(value: Any, stream: int) -> Any:
    """A cuda.core view of device memory."""
    from cuda.core.utils import StridedMemoryView

    kind = type(value).__name__
    if not (hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__")):
        raise ParamsError(
            f"{kind} has neither __dlpack__ nor __cuda_array_interface__; "
            "pass a GPU tensor, or a raw pointer as DeviceArray(pointer, shape, dtype)"
        )
    if hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] == _DLPACK_CPU:
        raise ParamsError(f"the {kind} of shape {tuple(value.shape)} lies in host memory; move it to the GPU first")
    try:
        return StridedMemoryView.from_any_interface(value, stream_ptr=stream)
    except BufferError as error:
        raise ParamsError(f"the {kind} cannot be shared with a kernel: {error}") from error
