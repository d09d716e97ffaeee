"""Resource usage of kernels as reported by ptxas (``--ptxas-options=-v``). A spill is a register kept in local memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tide_runtime.errors import TargetError


@dataclass(frozen=True)
class Resources:
    """Resources of one entry point in one cubin.

    Args:
        registers: per thread.
        shared_bytes: static shared memory per block; a launch plan adds the dynamic part.
        stack_bytes: stack frame in local memory, per thread.
        spill_store_bytes, spill_load_bytes: registers written to and read from local memory, per thread.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int

    @property
    def spills(self) -> bool:
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


@dataclass(frozen=True)
class KernelImage:
    """A cubin or PTX and the resources of its entry points (none for PTX, which the driver compiles later)."""

    content: bytes
    resources: dict[str, Resources]


def parse_resources(log: str) -> dict[str, Resources]:
    """Entry point → resources, from ptxas's report in NVRTC's log (same format in CUDA 12.9 and 13).

    Raises:
        TargetError: the report of a kernel lacks a value.
    """
    parts = re.split(r"Compiling entry function '(\w+)' for '\w+'", log)
    return {name: _parse_one(name, report) for name, report in zip(parts[1::2], parts[2::2], strict=True)}


def _parse_one(name: str, report: str) -> Resources:
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    used = re.search(r"Used (\d+) registers(.*)", report)
    if frame is None or used is None:
        raise TargetError(f"ptxas reported no stack frame or no registers for {name}; its report was:\n{report.strip()}")
    shared = re.search(r"(\d+) bytes smem", used[2])  # omitted when it is 0
    return Resources(int(used[1]), int(shared[1]) if shared else 0, int(frame[1]), int(frame[2]), int(frame[3]))
