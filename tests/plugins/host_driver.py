"""A `Driver` that runs kernels on the host: the same sources, compiled by g++ (tests/plugins/host_shim)."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from collections.abc import Sequence
from ctypes import Structure
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tide_plugins.conformance.case import ELEMENTS, Case, Tensors
from tide_plugins.kernels import CSRC
from tide_plugins.launch.device_array import DeviceArray
from tide_plugins.launch.kernel_library import KernelLibrary
from tide_plugins.plans import LaunchPlan

SHIM = Path(__file__).parent / "host_shim"
CACHE = Path(__file__).parents[2] / "build" / "host_kernels"
COMPILE = ("g++", "-std=c++17", "-O2", "-g1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fPIC", "-shared")
SANITIZE = ("-O1", "-g0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
_STATUS = {
    1: "threads wait for one that never comes",
    2: "no such kernel",
}
_NAMES = {np.dtype(kind): name for name, kind in ELEMENTS.items()} | {
    np.dtype(np.int32): "i32",
    np.dtype(np.int64): "i64",
    np.dtype(np.uint64): "u64",
    np.dtype(np.uint8): "u8",
}


class _CPlan(Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
    )


def host_library(*flags: str) -> Path:
    """The kernels as a shared library, recompiled when a source, a flag or the compiler has changed."""
    sources = sorted((*CSRC.iterdir(), *SHIM.iterdir()))
    version = subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(repr((COMPILE, flags, version)).encode())
    for path in sources:
        key.update(path.name.encode() + path.read_bytes())
    library = CACHE / f"{key.hexdigest()[:16]}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        include = [f"-I{SHIM}", f"-I{CSRC}", "-include", "cuda_on_host.h", "-DTIDE_GRAPH_CONDITION"]
        subprocess.run([*COMPILE, *flags, *include, str(SHIM / "kernels_on_host.cpp"), "-o", str(unfinished)], check=True)
        unfinished.replace(library)  # another process may compile it concurrently
    return library


@cache
def _loaded(path: Path) -> Any:
    return ctypes.CDLL(str(path))


@dataclass(frozen=True)
class HostMemory:
    """Zero-initialized, 256-byte aligned host memory."""

    owner: Any
    pointer: int


@dataclass
class HostDriver:
    """``order``: execution order of blocks and threads; see host_shim/block.h."""

    order: int = 0
    device: int = 0
    compute: int = 90
    library: Path = field(default_factory=host_library)

    def load(self, image: bytes, ptx: bool, symbol: str) -> str:
        return symbol

    def zeros(self, count_bytes: int, stream: int) -> HostMemory:
        memory = np.zeros(count_bytes + 256, np.uint8)
        skipped = -memory.ctypes.data % 256
        return HostMemory(memory, memory.ctypes.data + skipped)

    def launch(self, entry: str, plan: LaunchPlan, params: Structure, stream: int, arguments: Sequence[str] = ()) -> None:
        c_plan = _CPlan(plan.grid, plan.block, plan.shared_bytes)
        status = _loaded(self.library).tide_launch(entry.encode(), ctypes.byref(params), ctypes.byref(c_plan), self.order)
        assert status == 0, f"{entry}: {_STATUS[status]}"

    def graph_condition(self) -> tuple[int, int, int]:
        """Handle and value of the last graph condition set, and the number of times."""
        handle, value, calls = ctypes.c_uint64(), ctypes.c_uint32(), ctypes.c_int32()
        _loaded(self.library).tide_graph_condition(ctypes.byref(handle), ctypes.byref(value), ctypes.byref(calls))
        return handle.value, value.value, calls.value

    def kernels(self) -> KernelLibrary:
        nothing_to_build: Any = SimpleNamespace(build=lambda *_: SimpleNamespace(image=SimpleNamespace(content=b"")))
        return KernelLibrary(self, nothing_to_build)


def on_host(array: np.ndarray) -> DeviceArray:
    """Host memory as a `DeviceArray`."""
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return DeviceArray(array.ctypes.data, array.shape, _NAMES[array.dtype], strides=strides, owner=array)


def run_case(case: Case, driver: HostDriver, graph_condition: int | None = None) -> Tensors:
    """Launch a case on its tensors and return them."""
    tensors = {name: on_host(tensor) for name, tensor in case.tensors.items()}
    launch = case.prepare(driver.kernels(), stream=0, **case.numbers, **tensors)
    (launch if graph_condition is None else launch.with_condition(graph_condition)).enqueue(0)
    return case.tensors
