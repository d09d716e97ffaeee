"""Valid tensors for launches, for tests to break one at a time; a builder that compiles empty kernels."""

from __future__ import annotations

from math import prod
from typing import Any

from tide_plugins.kernels import KERNELS
from tide_plugins.launch.device_array import ITEM_BYTES, DeviceArray

EMPTY_KERNELS = {
    kernel.file_name: "\n".join(f'extern "C" __global__ void {name}() {{}}' for name in kernel.entry_points).encode()
    for kernel in KERNELS
}


class Addresses:
    """Allocates fake device addresses: disjoint and 256-byte aligned."""

    def __init__(self) -> None:
        self._next = 0x1000_0000

    def array(self, dtype: str, *shape: int, **more: Any) -> DeviceArray:
        array = DeviceArray(self._next, shape, dtype, **more)
        self._next += (prod(shape) * ITEM_BYTES[dtype] // 256 + 1) * 256
        return array


def router_tensors(rows: int = 8, hidden_size: int = 4096, width: int = 128, dtype: str = "f16") -> dict[str, Any]:
    new = Addresses().array
    return {
        "hidden": new(dtype, rows, hidden_size),
        "down": new("f32", width, hidden_size),
        "down_bias": new("f32", width),
        "up": new("f32", width),
        "up_bias": new("f32", 1),
        "score": new("f32", rows),
    }


def turn_tensors(rows: int = 4, ring_turns: int = 8) -> dict[str, Any]:
    new = Addresses().array
    return {
        **{name: new("i64", rows) for name in ("length", "last_token", "input_ids", "position_ids", "write_index")},
        **{name: new("i32", rows) for name in ("emitted", "position_ids32", "write_index32", "seqlens_k")},
        **{name: new("i32") for name in ("running", "turns_left", "proceed")},
        "exits": new("u8", rows),
        "ring": new("i64", ring_turns, rows),
        "counts": new("i64", 2),
    }
