"""Valid tensors for every kernel's launch, for tests to break one at a time; a builder that compiles empty kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from tide_plugins.kernels import KERNELS
from tide_plugins.launch.decode_loop import (
    prepare_choose_token,
    prepare_exit_candidates,
    prepare_exit_gate,
    prepare_exit_inputs,
    prepare_exit_join,
    prepare_exit_merge,
    prepare_exit_score,
    prepare_loop_turn,
    prepare_take_tokens,
)
from tide_plugins.launch.device_array import ITEM_BYTES, DeviceArray
from tide_plugins.launch.exact_loop import prepare_text_accept, prepare_text_drafts
from tide_plugins.launch.exit_router import prepare_exit_router

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


def take_tensors(rows: int = 4) -> dict[str, Any]:
    new = Addresses().array
    return {
        **{name: new("i64", rows) for name in ("chosen", "limit", "length", "last_token")},
        "eos": new("i64", 8),
        "finished": new("u8", rows),
        "emitted": new("i32", rows),
        "running": new("i32"),
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


def input_tensors(rows: int = 4, width: int = 8, row_bytes: int = 128, exits: int = 2) -> dict[str, Any]:
    new = Addresses().array
    return {
        **{name: new("u8", rows, width, row_bytes) for name in ("states", "window")},
        "finished": new("u8", rows),
        "waiting": new("i32", exits, rows),
        "position_ids": new("i64", rows, width),
        "position_ids32": new("i32", rows, width),
        **{name: new("i64", rows) for name in ("length", "write_index", "logits_index")},
        **{name: new("i32", rows) for name in ("write_index32", "seqlens_k", "logits_index32")},
        "choice": new("i32"),
    }


def gate_tensors(rows: int = 4, exits: int = 2) -> dict[str, Any]:
    new = Addresses().array
    return {
        "score": new("f32", rows),
        "waiting": new("i32", exits, rows),
        **{name: new("i64", rows) for name in ("exit_token", "chosen")},
        **{name: new("u8", rows) for name in ("finished", "exits")},
        **{name: new("i32") for name in ("turns_left", "deeper")},
        "counts": new("i64", exits + 1),
    }


def choose_tensors(sequences: int = 4, tokens: int = 3, vocab: int = 1000) -> dict[str, Any]:
    new = Addresses().array
    return {
        "logits": new("f16", sequences * tokens, vocab),
        **{name: new("f32", sequences) for name in ("temperature", "tail", "min_p")},
        "top_k": new("i32", sequences),
        "key": new("u64", sequences, 2),
        "length": new("i64", sequences),
        "finished": new("u8", sequences),
        "chosen": new("i64", sequences * tokens),
    }


def merge_tensors(rows: int = 4, exits: int = 2) -> dict[str, Any]:
    new = Addresses().array
    return {
        "exits": new("u8", rows),
        **{name: new("i64", rows) for name in ("deep_token", "chosen")},
        "waiting": new("i32", exits, rows),
    }


def draft_tensors(rows: int = 4, room: int = 64, classes: int = 3, sizes: int = 3) -> dict[str, Any]:
    new = Addresses().array
    return {
        **{name: new("i64", rows) for name in ("length", "limit", "write_index")},
        **{name: new("i32", rows) for name in ("guessed", "matched", "write_index32", "seqlens_k")},
        **{name: new("i32", rows, classes) for name in ("hits", "tries")},
        **{name: new("i64", rows, 1 << (sizes - 1)) for name in ("input_ids", "position_ids")},
        "position_ids32": new("i32", rows, 1 << (sizes - 1)),
        "text": new("i32", rows, room),
        "finished": new("u8", rows),
        "least": new("i32", classes),
        "prior": new("f32", classes),
        "prices": new("f32", sizes),
        "guess": new("i32", rows, 15),
        "expected": new("f32", rows, sizes),
        "choice": new("i32"),
    }


def accept_tensors(rows: int = 4, room: int = 64, classes: int = 3) -> dict[str, Any]:
    new = Addresses().array
    return {
        "chosen": new("i64", rows, 16),
        **{name: new("i64", rows) for name in ("length", "limit", "bound")},
        **{name: new("i32", rows) for name in ("guessed", "matched")},
        **{name: new("i32", rows, classes) for name in ("hits", "tries")},
        **{name: new("i32") for name in ("choice", "turns_left", "proceed")},
        "guess": new("i32", rows, 15),
        "least": new("i32", classes),
        "eos": new("i64", 8),
        "text": new("i32", rows, room),
        "finished": new("u8", rows),
        "ring": new("i64", 8, rows, 17),
        "counts": new("i64", 1),
    }


Prepare = Callable[..., Any]


def every_kernel() -> Iterator[tuple[str, Prepare, dict[str, Any], dict[str, Any]]]:
    """Kernel name, prepare function, valid tensors, and other arguments of every kernel."""
    yield "exit_router", prepare_exit_router, router_tensors(), {"epsilon": 1e-6}
    yield "take_tokens", prepare_take_tokens, take_tensors(), {}
    yield "loop_turn", prepare_loop_turn, turn_tensors(), {"slots": 512}
    yield "exit_score", prepare_exit_score, score_tensors(), {}
    yield "choose_token", prepare_choose_token, choose_tensors(), {}
    numbers = {"exit_count": 2, "number": 2, "threshold": 0.5, "has_mlp": True}
    yield "exit_candidates", prepare_exit_candidates, candidate_tensors(), numbers
    yield "exit_join", prepare_exit_join, join_tensors(), {"number": 2}
    yield "exit_gate", prepare_exit_gate, gate_tensors(), {"threshold": 0.5, "number": 2, "width": 8}
    yield "exit_inputs", prepare_exit_inputs, input_tensors(), {"slots": 512, "number": 2}
    yield "exit_merge", prepare_exit_merge, merge_tensors(), {}
    yield "text_drafts", prepare_text_drafts, draft_tensors(), {"slots": 512, "draft_limit": 15, "weight": 4.0}
    yield "text_accept", prepare_text_accept, accept_tensors(), {}
