"""A `Driver` that records calls without loading or launching anything."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import Structure
from dataclasses import dataclass, field
from typing import Any

from tide_plugins.plans import LaunchPlan


@dataclass
class RecordedLaunch:
    """``params``: a copy of the struct at the time of the launch."""

    entry: Any
    plan: LaunchPlan
    params: Any
    stream: int
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class FakeMemory:
    pointer: int
    count_bytes: int


@dataclass
class RecordingDriver:
    """Records calls; of the architecture of an H200 by default."""

    device: int = 0
    compute: int = 90
    loaded: list[tuple[bool, str]] = field(default_factory=list)
    memory: list[FakeMemory] = field(default_factory=list)
    launches: list[RecordedLaunch] = field(default_factory=list)

    def load(self, image: bytes, ptx: bool, symbol: str) -> str:
        assert symbol.encode() in image
        self.loaded.append((ptx, symbol))
        return symbol

    def zeros(self, count_bytes: int, stream: int) -> FakeMemory:
        self.memory.append(FakeMemory(0x7000_0000_0000 + 2**30 * len(self.memory), count_bytes))
        return self.memory[-1]

    def launch(self, entry: str, plan: LaunchPlan, params: Structure, stream: int, arguments: Sequence[str] = ()) -> None:
        copy = type(params).from_buffer_copy(bytes(ctypes.string_at(ctypes.addressof(params), ctypes.sizeof(params))))
        self.launches.append(RecordedLaunch(entry, plan, copy, stream, tuple(arguments)))
