"""Joules that the machine's own counters have seen: RAPL of Intel and AMD processors, NVML of NVIDIA GPUs.

They count everything on the machine, so a figure means something on an otherwise idle one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
_MICRO, _MILLI = 1e-6, 1e-3


class EnergyMeter:
    """Sums up all counters found. ``absent``: why there is nothing to read, empty when there is."""

    def __init__(self, powercap: Path = POWERCAP) -> None:
        packages, self.absent = _rapl(powercap)
        self._counters = [*packages, *_nvml()]
        if self._counters:
            self.absent = ""

    def joules(self) -> float | None:
        """Joules since an arbitrary moment, so only differences count; None without counters. Read at least once a minute."""
        return sum(read() for read in self._counters) if self._counters else None


class _RaplPackage:
    """One processor package (Linux, Documentation/power/powercap): microjoules that start again at a known number."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._last, self._turns = int(self._file.read_text()), 0

    def __call__(self) -> float:
        now = int(self._file.read_text())
        self._turns += now < self._last
        self._last = now
        return _MICRO * (now + self._turns * self._range)


def _rapl(powercap: Path) -> tuple[list[Callable[[], float]], str]:
    folders = sorted(powercap.glob("intel-rapl:[0-9]*"))
    packages = [folder for folder in folders if folder.name.count(":") == 1]  # intel-rapl:0:0 is a part of intel-rapl:0
    if not packages:
        return [], f"no RAPL counters in {powercap}"
    try:
        return [_RaplPackage(folder) for folder in packages], ""
    except PermissionError:
        return [], f"RAPL's counters may only be read by root (chmod a+r {powercap}/intel-rapl:*/energy_uj)"
    except (OSError, ValueError) as error:
        return [], f"RAPL's counters cannot be read ({error})"


def _nvml() -> list[Callable[[], float]]:
    """Every GPU that counts its energy (Volta and later); none without the package nvidia-ml-py and a driver."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        for handle in handles:
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except pynvml.NVMLError:
        return []
    return [partial(_millijoules, pynvml.nvmlDeviceGetTotalEnergyConsumption, handle) for handle in handles]


def _millijoules(read: Callable[[object], int], handle: object) -> float:
    return _MILLI * read(handle)
