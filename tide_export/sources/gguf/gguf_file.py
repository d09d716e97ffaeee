"""Read a GGUF file: its keys, and its tensors as maps of the file, so that reading takes no memory and a fraction of a second.

Format: docs/gguf.md of https://github.com/ggml-org/ggml; what llama.cpp refuses (`gguf_init_from_file_impl` in ggml/src/gguf.cpp)
is refused here. The reader of the package gguf makes several arrays for each token of the vocabulary and takes a minute.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tide_runtime.errors import ModelFilesError

from tide_export.sources.gguf.gguf_metadata import Metadata

PLAIN = ("F32", "F16", "BF16")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_ALIGNMENT = 32  # bytes, where no key general.alignment says another
# GGUF's types of values, by number.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_NUMPY = {"F32": np.float32, "F16": np.float16}


class _DamagedError(ValueError):
    """What is wrong with the file."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file.

    Args:
        kind: GGUF's type, such as Q4_K.
        data: read-only map of the file: numbers of the tensor's shape for F32 and F16, else bytes [N, bytes of a row], or of
            several experts [E, N, bytes of a row].
    """

    name: str
    kind: str
    data: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantised tensor, output features first."""
        if self.kind in _NUMPY:
            return tuple(self.data.shape)
        block, size = _block(self.kind)
        return (*self.data.shape[:-1], self.data.shape[-1] // size * block)


def is_gguf(source: str) -> bool:
    """Whether ``source`` names a GGUF file, by its suffix or its first bytes."""
    path = Path(source)
    return source.endswith(".gguf") or (path.is_file() and _begins_as_gguf(path))


def _begins_as_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


def read_file(path: Path) -> tuple[Metadata, dict[str, GgufTensor]]:
    """All keys, and all tensors by GGUF name.

    Raises ModelFilesError when the file is missing, no GGUF file, cut short, damaged, or one part of several.
    """
    if not path.is_file():
        raise ModelFilesError(f"there is no file {path}; give a .gguf file, a model directory, or a hub id such as org/name")
    if not _begins_as_gguf(path):
        raise ModelFilesError(f"{path} is no GGUF file: it does not begin with {_MAGIC.decode()}; download it again")
    try:
        keys, tensors = _read(path)
    except (_DamagedError, struct.error, UnicodeDecodeError) as error:
        raise ModelFilesError(
            f"{path} cannot be read ({error}): it was cut short or changed, or is newer than the package "
            "gguf; download it again, or upgrade gguf"
        ) from error
    if isinstance(parts := keys.get("split.count", 0), int) and parts > 1:
        raise ModelFilesError(
            f"{path.name} is part {keys.get('split.no', 0) + 1} of {parts}: join the parts with llama.cpp's "
            f"`llama-gguf-split --merge {path.name} model.gguf`, and export model.gguf"
        )
    return Metadata(path.name, keys), tensors


def _read(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    with path.open("rb") as file:
        header = _Header(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), len(_MAGIC))
    version = header.number("I")
    if version & 0xFFFF == 0:  # gguf dequantises blocks in this machine's order
        raise ModelFilesError(f"{path.name} has its bytes in the other order; convert it with gguf's `gguf-convert-endian`")
    if version not in _VERSIONS:
        raise _DamagedError(f"its version is {version}, expected {' or '.join(map(str, _VERSIONS))}")
    tensor_count, key_count = header.number("Q"), header.number("Q")
    keys: dict[str, Any] = {}
    for _ in range(key_count):
        name = header.string()
        if name in keys:
            raise _DamagedError(f"it has the key {name} twice")
        keys[name] = header.value(header.number("I"))
    return keys, _tensors(header, tensor_count, keys.get("general.alignment", _ALIGNMENT))


def _tensors(header: _Header, count: int, alignment: Any) -> dict[str, GgufTensor]:
    """Each tensor begins where the one before it ends, rounded up to ``alignment`` bytes."""
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise _DamagedError(f"general.alignment is {alignment!r}, expected a power of two")
    infos = [header.tensor_info() for _ in range(count)]
    start = -(-header.at // alignment) * alignment
    end = 0
    tensors = dict[str, GgufTensor]()
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise _DamagedError(f"it has the tensor {name} twice")
        if offset != end:
            raise _DamagedError(f"the tensor {name} begins at {offset}, expected {end}")
        data = header.map(name, shape, kind, start + offset)
        tensors[name] = GgufTensor(name, kind, data)
        end = -(-(offset + data.nbytes) // alignment) * alignment
    return tensors


def _block(kind: str) -> tuple[int, int]:
    """Values of a block of the type, and its bytes."""
    import gguf

    return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


class _Header:
    """Reads ``data`` from the byte ``at`` on; raises struct.error or _DamagedError at its end."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data, self.at = data, at

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        data = self.data
        at = self.at
        end = len(self.data)
        length = struct.Struct("<Q")
        found = []
        for _ in range(count):
            (size,) = length.unpack_from(data, at)
            at += length.size + size
            if at > end:
                raise _DamagedError(f"a text of {size} bytes ends behind the end of the file")
            found.append(data[at - size : at].decode())
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        """A number, text, or list of numbers or texts."""
        if kind == _STRING:
            return self.string()
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise _DamagedError(f"a key has a value of the type {kind}, which is not known")
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return self.strings(count)
        if kind not in _NUMBERS:
            raise _DamagedError(f"a key has a list of values of the type {kind}, which is not known")
        found = self._array(np.dtype(f"<{_NUMBERS[kind]}"), count, self.at)
        self.at += found.nbytes
        return found.tolist()

    def tensor_info(self) -> tuple[str, tuple[int, ...], str, int]:
        """Name, shape (output features first), type, and offset behind the header."""
        import gguf

        name = self.string()
        count = self.number("I")
        if count > _MAX_DIMENSIONS:
            raise _DamagedError(f"the tensor {name} has {count} dimensions")
        shape = tuple(self.number("Q") for _ in range(count))[::-1]
        kind = self.number("I")
        if kind not in iter(gguf.GGMLQuantizationType):
            raise _DamagedError(f"the tensor {name} has the type {kind}, which is not a valid GGMLQuantizationType")
        return name, shape, gguf.GGMLQuantizationType(kind).name, self.number("Q")

    def map(self, name: str, shape: tuple[int, ...], kind: str, start: int) -> NDArray[Any]:
        if kind in _NUMPY:
            return self._array(np.dtype(_NUMPY[kind]), math.prod(shape), start).reshape(shape)
        block, size = _block(kind)
        if not shape or shape[-1] % block:
            raise _DamagedError(f"the tensor {name} of shape {shape} has no whole blocks of {kind}")
        rows = (*shape[:-1], shape[-1] // block * size)
        return self._array(np.dtype(np.uint8), math.prod(rows), start).reshape(rows)

    def _array(self, dtype: np.dtype, count: int, start: int) -> NDArray[Any]:
        if start + count * dtype.itemsize > len(self.data):
            raise _DamagedError(f"{count} numbers end behind the end of the file")
        return np.frombuffer(self.data, dtype, count, start) if count else np.empty(0, dtype)
