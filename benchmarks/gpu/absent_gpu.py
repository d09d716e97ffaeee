"""Stands where there is no GPU: everything up to the launch is done for a GPU of a given architecture, and nothing runs."""

from __future__ import annotations

import sys
from ctypes import Structure
from dataclasses import dataclass
from typing import NoReturn

from tide_plugins.plans import LaunchPlan
from tide_runtime.errors import TargetError

NOT_RUN = 2  # the exit code


@dataclass(frozen=True)
class AbsentMemory:
    pointer: int


class AbsentGpu:
    """A `Driver` that loads by looking the symbol up in the image, and refuses to launch."""

    device = 0

    def __init__(self, compute: int) -> None:
        self.compute, self.sm_count = compute, 132  # an H200's
        self._next = 2**40

    def load(self, image: bytes, ptx: bool, symbol: str) -> str:
        if symbol.encode() not in image:
            raise TargetError(f"the image holds no {symbol}")
        return symbol

    def allow_shared(self, entry: str, shared_bytes: int) -> None:
        most = 227 * 1024 if self.compute >= 90 else 64 * 1024
        if shared_bytes > most:
            raise TargetError(f"{entry} wants {shared_bytes} bytes of shared memory per block; this GPU has {most}")

    def zeros(self, count_bytes: int, stream: int) -> AbsentMemory:
        return AbsentMemory(self.allocate(count_bytes))

    def launch(self, entry: str, plan: LaunchPlan, params: Structure, stream: int) -> None:
        raise TargetError(f"there is no GPU to launch {entry} on")

    def allocate(self, count_bytes: int) -> int:
        """An address that nothing else has, aligned as an allocation is."""
        place = self._next
        self._next += (count_bytes // 256 + 1) * 256
        return place

    def upload(self, pointer: int, source: object) -> None:
        raise TargetError("there is no GPU to copy to")

    def download(self, target: object, pointer: int) -> None:
        raise TargetError("there is no GPU to copy from")


def say_not_run(reason: TargetError, done: str) -> NoReturn:
    """Print that nothing ran, and exit. ``done``: what was done instead."""
    print(f"NOT RUN: {reason}\n{done}", file=sys.stderr)
    sys.exit(NOT_RUN)
