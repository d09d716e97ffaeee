"""Stands where there is no GPU: everything up to the launch is done for a GPU of a given architecture, and nothing runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
        self.compute = compute
        self._next = 2**40

    def load(self, image: bytes, ptx: bool, symbol: str) -> str:
        if symbol.encode() not in image:
            raise TargetError(f"the image holds no {symbol}")
        return symbol

    def zeros(self, count_bytes: int, stream: int) -> AbsentMemory:
        return AbsentMemory(self.allocate(count_bytes))

    def launch(self, entry: str, plan: LaunchPlan, params: Structure, stream: int, arguments: Sequence[str] = ()) -> None:
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
