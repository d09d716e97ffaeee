"""NVRTC, NVIDIA's run-time compiler: CUDA C++ in memory to a cubin or PTX. Needs neither a GPU nor a driver.

Bound with ctypes because cuda.bindings supports one NVRTC per process, and V100 kernels need CUDA 12's besides CUDA 13's.
Source: NVRTC documentation, https://docs.nvidia.com/cuda/nvrtc/.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tide_runtime.errors import TideError

_Program = ctypes.c_void_p


class CompilationError(TideError):
    """NVRTC rejected a source or an option; the message contains its log."""


@dataclass(frozen=True)
class Image:
    """A cubin or PTX, and the compiler's log (with ``--ptxas-options=-v`` including resources per kernel)."""

    content: bytes
    log: str


class Nvrtc:
    """One NVRTC library. Several may be open in one process; programs may be compiled in several threads at once."""

    def __init__(self, library: Path) -> None:
        # NVRTC opens this library by its name; 13.0's has no RPATH, so it would find none beside itself when it compiles.
        self._builtins = [ctypes.CDLL(str(path)) for path in sorted(library.parent.glob("libnvrtc-builtins.so.*"))]
        self._library = ctypes.CDLL(str(library))  # RTLD_LOCAL: two releases export the same names
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def version(self) -> tuple[int, int]:
        """Major and minor version, such as ``(13, 0)``."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check("nvrtcVersion", self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return major.value, minor.value

    def supported_architectures(self) -> list[int]:
        """Compute capabilities times ten that this library compiles for."""
        count = ctypes.c_int()
        self._check("nvrtcGetNumSupportedArchs", self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        found = (ctypes.c_int * count.value)()
        self._check("nvrtcGetSupportedArchs", self._library.nvrtcGetSupportedArchs(found))
        return list(found)

    def compile(self, name: str, source: bytes, headers: Mapping[str, bytes], options: Sequence[str], ptx: bool = False) -> Image:
        """Compile one translation unit.

        Args:
            name: file name in messages.
            headers: name → content of headers that ``#include`` finds before any include path.
            options: NVRTC's options.
            ptx: return PTX; otherwise the cubin.

        Raises:
            CompilationError: NVRTC rejects the source or an option; contains its log.
        """
        with self._program(name, source, headers) as program:
            result = self._library.nvrtcCompileProgram(program, len(options), _strings([option.encode() for option in options]))
            log = self._read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if result:
                raise CompilationError(f"{name} does not compile ({self._error(result)}) with {' '.join(options)}:\n{log}")
            return Image(self._read(program, "PTX" if ptx else "CUBIN"), log)

    @contextmanager
    def _program(self, name: str, source: bytes, headers: Mapping[str, bytes]) -> Iterator[_Program]:
        program = _Program()
        texts = _strings(list(headers.values()))
        names = _strings([key.encode() for key in headers])
        create = self._library.nvrtcCreateProgram
        self._check("nvrtcCreateProgram", create(ctypes.byref(program), source, name.encode(), len(headers), texts, names))
        try:
            yield program
        finally:
            self._check("nvrtcDestroyProgram", self._library.nvrtcDestroyProgram(ctypes.byref(program)))

    def _read(self, program: _Program, what: str) -> bytes:
        """Output of ``nvrtcGet<what>``, whose size is that of ``nvrtcGet<what>Size``."""
        size = ctypes.c_size_t()
        self._check(what, getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(what, getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, call: str, result: int) -> None:
        if result:
            raise CompilationError(f"{call} failed: {self._error(result)}")

    def _error(self, result: int) -> str:
        return self._library.nvrtcGetErrorString(result).decode()


def _strings(values: Sequence[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(values))(*values)
