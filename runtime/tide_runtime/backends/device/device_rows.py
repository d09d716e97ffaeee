"""Views of rows in device memory; assigning one slice to another copies on the device, without a round trip to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tide_runtime.backends.device.device import Device, Memory
from tide_runtime.backends.device.element_types import ElementType
from tide_runtime.sampler import RowSampling


class DeviceRows:
    """[T, W] elements in device memory; NumPy's ``asarray`` copies them to the host and synchronizes.

    Args:
        places: memory row of each of the T rows; None: contiguous rows.
        owner: object that keeps the memory alive.
        sampling: draws tokens where the rows are logits, see `RowSampling`.
    """

    def __init__(
        self,
        device: Device,
        pointer: int,
        shape: tuple[int, int],
        element: ElementType,
        owner: Memory,
        places: Sequence[int] | None = None,
        sampling: RowSampling | None = None,
    ) -> None:
        self.device = device
        self.pointer = pointer
        self.shape = shape
        self.element = element
        self._owner = owner
        self._places = places
        self.sampling = sampling
        self.row_bytes = shape[1] * element.bytes

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the host values."""
        return self.element.widened(np.empty(0, self.element.host)).dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[DeviceRow]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self._slice(index)
        return DeviceRow(self._slice(slice(index, index + 1)))

    def __setitem__(self, index: int | slice, source: Any) -> None:
        target = self._slice(index if isinstance(index, slice) else slice(index, index + 1))
        if isinstance(source, DeviceRow):
            source = source.rows
        if isinstance(source, DeviceRows):
            _copy_on_device(target, source)
        else:
            _upload(target, np.broadcast_to(self.element.narrowed(np.asarray(source)), target.shape))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        bits = np.empty(self.shape, self.element.host)
        for first, count, pointer in self.runs():
            self.device.download(bits[first : first + count], pointer)
        self.device.synchronize()
        values = self.element.widened(bits)
        return values if dtype is None else values.astype(dtype, copy=False)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.empty_like:
            rows, width = kwargs["shape"]
            memory = self.device.allocate(rows * width * self.element.bytes)
            return DeviceRows(self.device, memory.pointer, (rows, width), self.element, memory, None)
        return function(*[np.asarray(a) if isinstance(a, DeviceRows) else a for a in args], **kwargs)

    def astype(self, dtype: Any, copy: bool = True) -> NDArray[Any]:
        return np.asarray(self).astype(dtype, copy=False)

    def copy(self) -> NDArray[Any]:
        return np.asarray(self)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Runs of contiguous rows: (index of the first row, number of rows, device address)."""
        if self._places is None:
            if len(self):
                yield 0, len(self), self.pointer
            return
        begin = 0
        while begin < len(self):
            end = begin + 1
            while end < len(self) and self._places[end] == self._places[end - 1] + 1:
                end += 1
            yield begin, end - begin, self.pointer + self._places[begin] * self.row_bytes
            begin = end

    def _slice(self, index: slice) -> DeviceRows:
        first, stop, _ = index.indices(len(self))
        shape = (max(0, stop - first), self.shape[1])
        if self._places is not None:
            places = self._places[first:stop]
            pointer = self.pointer
        else:
            places = None
            pointer = self.pointer + first * self.row_bytes
        return DeviceRows(self.device, pointer, shape, self.element, self._owner, places, self.sampling)


class DeviceRow:
    """One row of `DeviceRows`, [W]."""

    def __init__(self, rows: DeviceRows) -> None:
        self.rows = rows
        self.shape = rows.shape[1:]
        self.sampling = rows.sampling

    @property
    def pointer(self) -> int:
        [(_, _, pointer)] = self.rows.runs()
        return pointer

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.rows.__array__(dtype)[0]

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]


def _upload(target: DeviceRows, values: NDArray[Any]) -> None:
    for first, count, pointer in target.runs():
        target.device.upload_copy(pointer, values[first : first + count])


def _copy_on_device(target: DeviceRows, source: DeviceRows) -> None:
    assert target.shape == source.shape, (target.shape, source.shape)
    for first, count, pointer in target.runs():
        for inner, many, origin in source._slice(slice(first, first + count)).runs():
            target.device.copy(pointer + inner * target.row_bytes, origin, many * target.row_bytes)
