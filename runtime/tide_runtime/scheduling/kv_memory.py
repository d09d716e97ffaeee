"""How much memory keys and values may take: the engine's budget, in blocks."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tide_runtime.backends.kv_caches import BLOCK_TOKENS
from tide_runtime.errors import ParamsError
from tide_runtime.scheduling.scheduler import blocks_of

_SHARE = 0.25  # of the memory that is free when the engine is loaded
_PREFIX_FACTOR = 4  # memory for this many times the running requests is all that is taken by default


def kv_blocks(bytes_per_token: int, budget: int | None, rows: int, slots: int) -> int:
    """Blocks of KV memory for ``rows`` requests of up to ``slots`` tokens and the prefix cache.

    Args:
        budget: bytes; None: a quarter of what the machine has free, and no more than could be used.

    Raises ParamsError when ``budget`` does not hold one sequence of full length.
    """
    block_bytes, least = bytes_per_token * BLOCK_TOKENS, blocks_of(slots)
    if budget is None:
        return min(max(least, int(_SHARE * free_memory()) // block_bytes), _PREFIX_FACTOR * rows * least)
    if budget < least * block_bytes:
        raise ParamsError(
            f"kv_memory is {budget} bytes, one sequence of {slots} tokens needs {least * block_bytes}; set it to at least that, "
            "or export with a smaller --max-seq-len"
        )
    return budget // block_bytes


def free_memory() -> int:
    """Bytes that this process can still take: of the machine, and of its control group if that has a limit."""
    free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError, StopIteration, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = [1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])]
    with suppress(OSError, ValueError):  # "max" is no number
        group = Path("/sys/fs/cgroup")
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(free))
