"""Share of the CPU that other processes took during a measurement, so that figures from a busy machine are marked."""

from __future__ import annotations

import os
from collections.abc import Iterable
from time import perf_counter

from tide_bench.report import cores


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
        own = [process.cpu_times() for process in self._ours]
        return busy - sum(t.user + t.system for t in own)
