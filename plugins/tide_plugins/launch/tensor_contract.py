"""Declarative contract of a kernel's tensors, checked in one place.

A contract names dimensions. The first tensor with a dimension fixes its size, and errors name that tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tide_runtime.errors import ParamsError

from tide_plugins.kernels import DTYPES
from tide_plugins.launch.device_array import ITEM_BYTES, DeviceArray

ELEMENT = "T"  # placeholder of the kernel's element type, the same for all tensors with it


@dataclass(frozen=True)
class Tensor:
    """One tensor of a kernel.

    Args:
        name: as in the kernel's parameter struct.
        dtype: a key of `ITEM_BYTES`, or `ELEMENT`.
        shape: names of dimensions; empty: a scalar, which may also be a tensor of one element.
        optional: may be omitted (a null pointer).
        output: the kernel writes it.
    """

    name: str
    dtype: str
    shape: tuple[str, ...] = ()
    optional: bool = False
    output: bool = False


class ContractChecker:
    """Checks one call. ``kernel``: name for errors; ``device``: required device of every tensor."""

    def __init__(self, kernel: str, device: int) -> None:
        self._kernel, self._device = kernel, device
        self._sizes: dict[str, tuple[int, str]] = {}  # dimension → size and the tensor that fixed it
        self._element: tuple[str, str] | None = None

    def bind(self, tensors: Sequence[Tensor], arrays: Mapping[str, DeviceArray | None]) -> tuple[dict[str, int], str | None]:
        """Check the tensors. Returns the sizes of the dimensions, and the element type; None: no tensor with one was given.

        Raises ParamsError, with the actual and expected property, for one that is missing or invalid.
        """
        for tensor in tensors:
            array = arrays.get(tensor.name)
            if array is not None:
                self._check(tensor, array)
            elif not tensor.optional:
                raise ParamsError(f"{self._kernel}: {tensor.name} is missing")
        sizes = {name: size for name, (size, _) in self._sizes.items()}
        return sizes, self._element[0] if self._element else None

    def _check(self, tensor: Tensor, array: DeviceArray) -> None:
        if not isinstance(array, DeviceArray):
            self._fail(tensor, f"is a {type(array).__name__}", "a DeviceArray(pointer, shape, dtype) of GPU memory")
        self._check_dtype(tensor, array)
        self._check_shape(tensor, array)
        self._check_strides(tensor, array)
        if array.device != self._device:
            self._fail(tensor, f"is on GPU {array.device}", f"GPU {self._device}, where the kernel runs")
        item_bytes = ITEM_BYTES[array.dtype]
        if array.pointer % item_bytes:
            self._fail(tensor, f"begins at address {array.pointer:#x}", f"a multiple of its elements' {item_bytes} bytes")
        if tensor.output and not array.writable:
            self._fail(tensor, "is read-only", "memory that the kernel may write to")

    def _check_dtype(self, tensor: Tensor, array: DeviceArray) -> None:
        if tensor.dtype != ELEMENT:
            if array.dtype != tensor.dtype:
                self._fail(tensor, f"has dtype {array.dtype}", tensor.dtype)
        elif array.dtype not in DTYPES:
            self._fail(tensor, f"has dtype {array.dtype}", f"one of {', '.join(DTYPES)}")
        elif self._element is None:
            self._element = (array.dtype, tensor.name)
        elif array.dtype != self._element[0]:
            self._fail(tensor, f"has dtype {array.dtype}", f"{self._element[0]}, as {self._element[1]} has")

    def _check_shape(self, tensor: Tensor, array: DeviceArray) -> None:
        if not tensor.shape and array.shape in ((), (1,)):
            return
        if len(array.shape) != len(tensor.shape):
            self._fail(tensor, f"has shape {list(array.shape)}", f"[{', '.join(tensor.shape)}]" if tensor.shape else "a scalar")
        for dimension, size in zip(tensor.shape, array.shape, strict=True):
            wanted, by = self._sizes.setdefault(dimension, (size, tensor.name))
            if size != wanted:
                expected = f"[{', '.join(tensor.shape)}] with {dimension} = {wanted}, as in {by}"
                self._fail(tensor, f"has shape {list(array.shape)}", expected)

    def _check_strides(self, tensor: Tensor, array: DeviceArray) -> None:
        compact = DeviceArray(0, array.shape, array.dtype).element_strides
        used = [axis for axis, size in enumerate(array.shape) if size > 1]  # dimensions of size 1 may have any stride
        if 0 not in array.shape and any(array.element_strides[axis] != compact[axis] for axis in used):
            actual = f"has strides {list(array.element_strides)} for shape {list(array.shape)}"
            self._fail(tensor, actual, "a contiguous tensor")

    def _fail(self, tensor: Tensor, actual: str, expected: str) -> None:
        raise ParamsError(f"{self._kernel}: {tensor.name} {actual}; expected {expected}")
