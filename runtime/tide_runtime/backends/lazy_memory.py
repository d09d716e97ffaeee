"""Memory that the operating system backs page by page when it is first written, and takes back on request.

Linux only: elsewhere an ordinary zeroed array takes its place, which is never given back. macOS has the call, but keeps the
contents of the pages until it needs them.
"""

from __future__ import annotations

import contextlib
import mmap
import platform
import sys

import numpy as np
from numpy.typing import NDArray

from tide_runtime.errors import DeviceMemoryError

_ON_LINUX = sys.platform == "linux"
# Without it Linux refuses a mapping larger than the machine's memory. Python 3.11 lacks the constant; other machines' differs.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if platform.machine() in ("x86_64", "aarch64") else 0)


class LazyMemory:
    """``size`` zero bytes; ``bytes``: [size] uint8, page-aligned on Linux.

    Raises DeviceMemoryError when the operating system refuses the address space.
    """

    def __init__(self, size: int) -> None:
        self._map = _map(size) if _ON_LINUX else None
        self.bytes: NDArray[np.uint8] = (
            np.zeros(size, np.uint8) if self._map is None else np.frombuffer(self._map, np.uint8)[:size]
        )

    def give_back(self, start: int, end: int) -> bool:
        """Return the pages of bytes [start, end) to the operating system, after which the bytes are zero.

        Bytes on a page that the range covers in part are overwritten instead. False, and nothing done, where pages cannot be
        given back.
        """
        if self._map is None:
            return False
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= last:
            self.bytes[start:end] = 0
            return True
        self._map.madvise(mmap.MADV_DONTNEED, first, last - first)
        self.bytes[start:first] = 0
        self.bytes[last:end] = 0
        return True


def _map(size: int) -> mmap.mmap:
    """An anonymous private mapping in small pages: one written byte would back 2 MiB with huge pages."""
    try:
        mapping = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, OverflowError) as error:
        raise DeviceMemoryError(
            f"the operating system refuses {size} bytes of virtual memory for keys and values ({error}); use fewer sequences at "
            "a time or a smaller max_seq_len, or lift the limit (ulimit -v, sysctl vm.overcommit_memory)"
        ) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_NOHUGEPAGE)
    return mapping
