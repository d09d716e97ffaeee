"""What the machine's own counters say of a measurement: CPU time that other processes took, and the memory held."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

from tide_bench.report import cores


@cache
def _gpus() -> tuple[Any, tuple[object, ...]]:
    """NVML and its handles of all GPUs; no handles without the package nvidia-ml-py or a driver."""
    try:
        import pynvml
    except ImportError:
        return None, ()
    try:
        pynvml.nvmlInit()
        return pynvml, tuple(pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return None, ()


class OtherLoad:
    """Starts counting when made. ``processes``: ids of those that are timed; this process is never counted."""

    def __init__(self, processes: Iterable[int]) -> None:
        import psutil  # `tide-bench --help` works without it

        self._times = psutil.cpu_times
        self._ours = [psutil.Process(pid) for pid in {*processes, os.getpid()}]
        self._start, self._others = perf_counter(), self._others_seconds()

    def share(self) -> float:
        """CPU time of all other processes (and of the host, where it is a virtual one) over the cores' time so far, 0 to 1."""
        wall = (perf_counter() - self._start) * cores()
        return min(1.0, max(0.0, (self._others_seconds() - self._others) / wall))

    def _others_seconds(self) -> float:
        times = self._times()
        busy = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
        servers = [
            child for process in self._ours for child in process.children()
        ]  # those that ended are in their parents' times
        ours = sum(sum(process.cpu_times()[:4]) for process in self._ours)
        return busy - ours - sum(sum(server.cpu_times()[:2]) for server in servers)


_RESET_PEAK = "5"  # proc(5), /proc/pid/clear_refs


def forget_peak() -> None:
    """Count from now on; where the kernel forbids it, the peak since the process began stays."""
    with contextlib.suppress(OSError):
        for process in _self_and_children():
            (process / "clear_refs").write_text(_RESET_PEAK)


def peak_bytes() -> int:
    """Resident bytes at most since `forget_peak`, of this process and of the servers that its main thread has started."""
    with contextlib.suppress(OSError):
        found = [re.search(r"^VmHWM:\s+(\d+) kB", (one / "status").read_text(), re.M) for one in _self_and_children()]
        if found[0]:
            return 1024 * sum(int(one[1]) for one in found if one)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _self_and_children() -> list[Path]:
    """Their folders in /proc; raises OSError where there is no /proc."""
    own = Path(f"/proc/{os.getpid()}")
    return [own, *(Path("/proc", pid) for pid in (own / "task" / own.name / "children").read_text().split())]


def gpu_bytes() -> int | None:
    """Bytes that this process holds on GPUs, its contexts included; None where it uses none, or the driver does not tell (in some
    containers it counts by the host's process ids)."""
    library, handles = _gpus()
    held = []
    for handle in handles:
        with contextlib.suppress(library.NVMLError):
            processes = library.nvmlDeviceGetComputeRunningProcesses(handle)
            held += [one.usedGpuMemory for one in processes if one.pid == os.getpid() and one.usedGpuMemory is not None]
    return sum(held) if held else None


def free_gpu_bytes(ordinal: int) -> int | None:
    """Bytes that are free on GPU number ``ordinal`` of the driver's order; None where the driver does not tell."""
    library, handles = _gpus()
    if ordinal >= len(handles):
        return None
    with contextlib.suppress(library.NVMLError):
        return int(library.nvmlDeviceGetMemoryInfo(handles[ordinal]).free)
    return None
