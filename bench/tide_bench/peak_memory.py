"""The most memory this process has held, counted from a moment of one's choosing (Linux: proc(5), VmHWM and clear_refs)."""

from __future__ import annotations

import contextlib
import re
import resource
from pathlib import Path

_RESET_PEAK = "5"  # proc(5), /proc/pid/clear_refs


def forget_peak() -> None:
    """Count from now on; where the kernel forbids it, the peak since the process began stays."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)


def peak_bytes() -> int:
    """Resident bytes at most since `forget_peak`."""
    with contextlib.suppress(OSError):
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
        if found:
            return 1024 * int(found[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
