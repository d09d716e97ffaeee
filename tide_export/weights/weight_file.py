"""One file for all weights of a target: graphs refer to it, equal tensors are stored once, the runtime maps it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir

INLINE_BYTES = 1024  # smaller tensors stay in the graph
_ALIGNMENT = 4096  # bytes; one page, so that tensors can be mapped


class WeightFile:
    """Writes tensors one at a time: peak memory is the largest tensor, not the model.

    ``digest``: SHA-256 over those of the tensors in the order in which they were written.
    """

    def __init__(self, path: Path, progress: Callable[[int], None] | None = None) -> None:
        self.path = path
        self.digest = hashlib.sha256()
        self._file: BinaryIO = path.open("wb")
        self.progress = progress or (lambda written: None)
        self._by_identity: dict[Hashable, tuple[ir.TensorProtocol, int, int]] = {}
        self._by_content: dict[bytes, int] = {}

    def __enter__(self) -> WeightFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def externalise(self, model: ir.Model) -> None:
        """Move the model's large initializers into this file; small ones stay inline."""
        for name, value in model.graph.initializers.items():
            tensor = value.const_value
            assert tensor is not None
            if tensor.nbytes < INLINE_BYTES:
                value.const_value = ir.Tensor(np.array(tensor.numpy()), dtype=tensor.dtype, name=name)
                continue
            offset, length = self._store(tensor)
            value.const_value = ir.ExternalTensor(
                self.path.name,
                offset,
                length,
                tensor.dtype,
                shape=tensor.shape,
                name=name,
                base_dir=self.path.parent,
            )

    def _store(self, tensor: ir.TensorProtocol) -> tuple[int, int]:
        known = self._by_identity.get(identity(tensor))
        if known is not None:
            return known[1], known[2]
        if tensor.dtype.bitwidth < 8:  # NumPy has a byte for each of them
            data = memoryview(tensor.tobytes())
        else:
            data = memoryview(np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8))  # bf16 has no buffer protocol
        offset = self.store(data)
        self._by_identity[identity(tensor)] = (tensor, offset, len(data))
        return offset, len(data)

    def store(self, data: memoryview) -> int:
        """The offset of the bytes ``data`` in the file; appends them if they are new."""
        content = hashlib.sha256(data).digest()
        offset = self._by_content.get(content)
        if offset is None:
            offset = self._by_content[content] = self._append(data)
            self.digest.update(content)
        return offset

    def flush(self) -> None:
        """Make the stored bytes visible to other readers of the file."""
        self._file.flush()

    def _append(self, data: memoryview) -> int:
        self._file.write(bytes(-self._file.tell() % _ALIGNMENT))
        offset = self._file.tell()
        self._file.write(data)
        self.progress(len(data))
        return offset


class Folded(ir.LazyTensor):
    """``made`` of ``parts`` in the way that ``how`` says, when it is read: forms of a segment make the same one of them.

    ``dtype``: None is that of the first part.
    """

    def __init__(
        self,
        parts: Sequence[ir.TensorProtocol],
        how: Hashable,
        shape: Sequence[int],
        make: Callable[[Sequence[np.ndarray]], np.ndarray],
        dtype: ir.DataType | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self.how = how
        dtype = dtype or parts[0].dtype
        made = lambda: ir.Tensor(np.ascontiguousarray(make([part.numpy() for part in parts])), dtype=dtype)  # noqa: E731
        super().__init__(made, dtype=dtype, shape=ir.Shape(shape))


def identity(tensor: ir.TensorProtocol) -> Hashable:
    """Equal for tensors that are known to be equal without reading them. Valid as long as the tensors are."""
    return (tensor.how, *map(identity, tensor.parts)) if isinstance(tensor, Folded) else id(tensor)
