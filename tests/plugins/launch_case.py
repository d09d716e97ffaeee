"""Valid tensors for every kernel's launch, for tests to break one at a time; a builder that compiles empty kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tide_plugins.kernels import BUILT
from tide_plugins.launch.decode_loop import (
    prepare_exit_candidates,
    prepare_exit_gate,
    prepare_exit_join,
    prepare_exit_merge,
    prepare_exit_score,
    prepare_loop_turn,
)
from tide_plugins.launch.device_array import ITEM_BYTES, DeviceArray
from tide_plugins.launch.draft_verify import prepare_draft_verify
from tide_plugins.launch.exit_router import prepare_exit_router
from tide_plugins.launch.exit_select import prepare_exit_select
from tide_plugins.launch.exit_translate import prepare_exit_translate

EMPTY_KERNELS = {
    kernel.file_name: "\n".join(f'extern "C" __global__ void {name}() {{}}' for name in kernel.entry_points).encode()
    for kernel in BUILT
}


class Addresses:
    """Allocates fake device addresses: disjoint and 256-byte aligned."""

    def __init__(self) -> None:
        self._next = 0x1000_0000

    def array(self, dtype: str, *shape: int, **more: Any) -> DeviceArray:
        array = DeviceArray(self._next, shape, dtype, **more)
        self._next += (max(array.end - array.pointer, ITEM_BYTES[dtype]) // 256 + 1) * 256
        return array


def router_tensors(rows: int = 8, hidden_size: int = 4096, width: int = 128, dtype: str = "f16") -> dict[str, Any]:
    new = Addresses().array
    return {
        "hidden": new(dtype, rows, hidden_size),
        "down": new(dtype, width, hidden_size),
        "down_bias": new("f32", width),
        "up": new("f32", width),
        "up_bias": new("f32", 1),
        "score": new("f32", rows),
        "exits": new("u8", rows),
        **{name: new("i32", rows) for name in ("exit_rows", "continue_rows")},
        **{name: new("i32") for name in ("exit_count", "continue_count", "verdict")},
    }


def select_tensors(rows: int = 8, hidden_size: int = 4096, dtype: str = "f16") -> dict[str, Any]:
    new = Addresses().array
    return {
        **{name: new(dtype, rows, hidden_size) for name in ("hidden", "exit_states", "continue_hidden")},
        "head_input": new(dtype, 2 * rows, hidden_size),
        **{name: new("i32", rows) for name in ("exit_rows", "continue_rows", "origin", "continue_origin")},
        **{name: new("i32") for name in ("exit_count", "continue_count")},
    }


def translate_tensors(rows: int = 8, hidden_size: int = 4096, rank: int = 64, dtype: str = "f16") -> dict[str, Any]:
    new = Addresses().array
    return {
        "hidden": new(dtype, rows, hidden_size),
        "down": new(dtype, rank, hidden_size),
        "up": new(dtype, hidden_size, rank),
        "out": new(dtype, rows, hidden_size),
    }


def verify_tensors(rows: int = 4, width: int = 5, vocab: int = 0, dtype: str = "f16") -> dict[str, Any]:
    """Tensors of draft_verify: greedy for a ``vocab`` of 0, else sampling."""
    new = Addresses().array
    greedy = {"deep_tokens": new("i64", rows, width + 1)}
    sampling = {"probabilities": new(dtype, rows, width + 1, vocab), "seed": new("u64", rows)}
    return {
        "drafts": new("i64", rows, width),
        "draft_count": new("i32", rows),
        **(sampling if vocab else greedy),
        **{name: new("i64", rows) for name in ("limit", "length", "last_token")},
        "finished": new("u8", rows),
        **{name: new("i32", rows) for name in ("accepted", "emitted")},
        "tokens": new("i64", rows, width + 1),
        "running": new("i32"),
    }


def turn_tensors(rows: int = 4, ring_turns: int = 8) -> dict[str, Any]:
    new = Addresses().array
    return {
        **{name: new("i64", rows) for name in ("tokens", "length", "last_token", "input_ids", "position_ids", "write_index")},
        **{name: new("i32", rows) for name in ("emitted", "position_ids32", "write_index32", "seqlens_k")},
        **{name: new("i32") for name in ("running", "turns_left", "proceed")},
        "exits": new("u8", rows),
        "ring": new("i64", ring_turns, rows),
        "counts": new("i64", 2),
    }


def join_tensors(rows: int = 4, width: int = 8, row_bytes: int = 128, exits: int = 2) -> dict[str, Any]:
    new = Addresses().array
    return {
        **{name: new("u8", rows, width, row_bytes) for name in ("states", "window")},
        "finished": new("u8", rows),
        "waiting": new("i32", exits, rows),
        "last": new("u8", rows, row_bytes),
    }


def score_tensors(rows: int = 4, vocab: int = 32_000, dtype: str = "f16") -> dict[str, Any]:
    new = Addresses().array
    return {
        "logits": new(dtype, rows, vocab),
        "token": new("i64", rows),
        "mlp_score": new("f32", rows),
        "score": new("f32", rows),
    }


def candidate_tensors(rows: int = 4, exits: int = 2) -> dict[str, Any]:
    new = Addresses().array
    return {
        **{name: new("u8", rows) for name in ("finished", "exits")},
        "score": new("f32", rows),
        "wanted": new("i32"),
        "counts": new("i64", 2 * exits + 1),
    }


def gate_tensors(rows: int = 4, width: int = 8, exits: int = 2) -> dict[str, Any]:
    new = Addresses().array
    return {
        "score": new("f32", rows),
        "waiting": new("i32", exits, rows),
        "position_ids": new("i64", rows, width),
        "position_ids32": new("i32", rows, width),
        **{name: new("i64", rows) for name in ("exit_token", "chosen", "length", "write_index", "logits_index")},
        **{name: new("i32", rows) for name in ("write_index32", "seqlens_k", "logits_index32")},
        **{name: new("u8", rows) for name in ("finished", "exits")},
        **{name: new("i32") for name in ("turns_left", "deeper")},
        "counts": new("i64", exits + 1),
    }


def merge_tensors(rows: int = 4, exits: int = 2) -> dict[str, Any]:
    new = Addresses().array
    return {
        "exits": new("u8", rows),
        **{name: new("i64", rows) for name in ("deep_token", "chosen")},
        "waiting": new("i32", exits, rows),
    }


Prepare = Callable[..., Any]


def every_kernel() -> Iterator[tuple[str, Prepare, dict[str, Any], dict[str, Any]]]:
    """Kernel name, prepare function, valid tensors, and other arguments of every kernel."""
    yield "exit_router", prepare_exit_router, router_tensors(), {"threshold": 0.5, "epsilon": 1e-6}
    yield "exit_select", prepare_exit_select, select_tensors(), {}
    yield "exit_translate", prepare_exit_translate, translate_tensors(), {"epsilon": 1e-6}
    yield "draft_verify", prepare_draft_verify, verify_tensors(), {}
    yield "loop_turn", prepare_loop_turn, turn_tensors(), {"slots": 512}
    yield "exit_score", prepare_exit_score, score_tensors(), {}
    numbers = {"exit_count": 2, "number": 2, "threshold": 0.5, "has_mlp": True}
    yield "exit_candidates", prepare_exit_candidates, candidate_tensors(), numbers
    yield "exit_join", prepare_exit_join, join_tensors(), {"number": 2}
    yield "exit_gate", prepare_exit_gate, gate_tensors(), {"slots": 512, "threshold": 0.5, "number": 2, "width": 8}
    yield "exit_merge", prepare_exit_merge, merge_tensors(), {}
