"""Cases of a decode loop's kernels: one row to more than a block's threads, ended rows, full windows, last turns, NaN scores,
vocabularies of one token to more than a block's threads, logits without numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from tide_plugins.conformance.case import (
    ELEMENTS,
    TOLERANCE,
    Case,
    CaseSpec,
    Tensors,
    assert_close,
    assert_same,
    matrix,
    rng_for,
    untouched,
)
from tide_plugins.launch.decode_loop import prepare_exit_gate, prepare_exit_merge, prepare_exit_score, prepare_loop_turn
from tide_plugins.reference import decode_loop as reference

_SLOTS, _THRESHOLD = 64, 0.5
_ROWS = (1, 3, 32, 300)
_PLACES = {"write_index": np.int64, "write_index32": np.int32, "seqlens_k": np.int32}


def loop_cases() -> Iterator[CaseSpec]:
    for rows, left in product(_ROWS, (1, 2, 9)):
        for running in (0, rows):
            name = f"b{rows}-left{left}-running{running}"
            yield CaseSpec("loop_turn", name, lambda name=name, a=(rows, left, running): _turn(name, *a))  # type: ignore[misc]
        name = f"b{rows}-left{left}"
        yield CaseSpec("exit_gate", name, lambda name=name, a=(rows, left): _gate(name, *a))  # type: ignore[misc]
    for dtype, vocab, mlp in product(ELEMENTS, (1, 33, 1000, 2053), (False, True)):
        name = f"exit_score-{dtype}-v{vocab}-mlp{int(mlp)}"
        yield CaseSpec("exit_score", name, lambda name=name, a=(dtype, vocab, mlp): _score(name, *a))  # type: ignore[misc]
    for rows, deeper in product(_ROWS, (0, 1)):
        name = f"b{rows}-deeper{deeper}"
        yield CaseSpec("exit_merge", name, lambda name=name, a=(rows, deeper): _merge(name, *a))  # type: ignore[misc]


def _turn(name: str, rows: int, left: int, running: int) -> Case:
    rng = rng_for(name)
    given: Tensors = {
        "tokens": rng.integers(0, 2**31, rows),
        "emitted": rng.integers(0, 2, rows).astype(np.int32),
        "exits": rng.integers(0, 2, rows).astype(np.uint8),
        "length": rng.integers(0, _SLOTS + 2, rows),
        "last_token": rng.integers(0, 2**31, rows),
        "running": np.array([running], np.int32),
        "turns_left": np.array([left], np.int32),
        "ring": untouched(5, rows, dtype=np.int64),
        "counts": np.array([13, 4], np.int64),
    }
    outputs = {"input_ids": untouched(rows, dtype=np.int64), "position_ids": untouched(rows, dtype=np.int64)}
    outputs |= {"position_ids32": untouched(rows)} | {n: untouched(rows, dtype=kind) for n, kind in _PLACES.items()}
    outputs["proceed"] = untouched(1)
    return _case(prepare_loop_turn, given, outputs, {"slots": _SLOTS}, reference.loop_turn)


def _gate(name: str, rows: int, left: int, width: int = 4, row_bytes: int = 24) -> Case:
    rng = rng_for(name)
    finished = rng.choice([0, 0, 0, 1], rows).astype(np.uint8)
    score = rng.random(rows).astype(np.float32)
    score[rng.random(rows) < 0.2] = np.nan
    score[rng.random(rows) < 0.2] = _THRESHOLD
    given: Tensors = {
        "hidden": rng.integers(0, 256, (rows, row_bytes)).astype(np.uint8),
        "window": rng.integers(0, 256, (rows, width, row_bytes)).astype(np.uint8),
        "score": score,
        "finished": finished,
        "length": rng.integers(width, _SLOTS + 1, rows),
        "turns_left": np.array([left], np.int32),
        "waiting": rng.integers(0, width, rows).astype(np.int32),
    }
    outputs = {"position_ids": untouched(rows, width, dtype=np.int64), "position_ids32": untouched(rows, width)}
    outputs |= {n: untouched(rows, dtype=kind) for n, kind in _PLACES.items()} | {"deeper": untouched(1)}
    outputs |= {"logits_index": untouched(rows, dtype=np.int64), "logits_index32": untouched(rows)}
    outputs |= {n: untouched(rows, dtype=np.uint8) for n in ("exits", "wants")}
    return _case(prepare_exit_gate, given, outputs, {"slots": _SLOTS, "threshold": _THRESHOLD}, reference.exit_gate)


def _score(name: str, dtype: str, vocab: int, mlp: bool, rows: int = 24) -> Case:
    """``mlp``: its scores come in and the result goes to the same memory, as in the loop."""
    rng = rng_for(name)
    logits = matrix(6 * rng.standard_normal((rows, vocab)), dtype)
    token = logits.astype(np.float32).argmax(-1)
    token[rng.random(rows) < 0.2] = -1
    asked = rng.random(rows).astype(np.float32)
    asked[rng.random(rows) < 0.2] = np.nan
    asked[rng.random(rows) < 0.2] = _THRESHOLD
    score = asked if mlp else untouched(rows, dtype=np.float32)
    given: Tensors = {"logits": logits, "token": token, "score": score} | ({"mlp_score": score} if mlp else {})
    wanted = reference.exit_score({k: v.copy() for k, v in given.items()}, _THRESHOLD)["score"]
    numbers = {"mlp_threshold": _THRESHOLD}
    return Case(prepare_exit_score, given, numbers, lambda out: assert_close("score", out["score"], wanted, TOLERANCE["f32"]))


def _merge(name: str, rows: int, deeper: int) -> Case:
    rng = rng_for(name)
    given: Tensors = {
        "exits": rng.integers(0, 2, rows).astype(np.uint8),
        "exit_token": rng.integers(0, 2**31, rows),
        "deep_token": rng.integers(-1, 2**31, rows),
        "deeper": np.array([deeper], np.int32),
        "waiting": rng.integers(0, 4, rows).astype(np.int32),
        "counts": np.array([13, 4], np.int64),
    }
    return _case(prepare_exit_merge, given, {"chosen": untouched(rows, dtype=np.int64)}, {}, reference.exit_merge)


def _case(
    prepare: Callable[..., Any], given: Tensors, outputs: Tensors, numbers: dict[str, Any], expected: Callable[..., Tensors]
) -> Case:
    before = {name: tensor.copy() for name, tensor in given.items()}

    def check(out: Tensors) -> None:
        for name, wanted in expected(before, **numbers).items():
            assert_same(name, out[name], wanted.astype(out[name].dtype))

    return Case(prepare, given | outputs, numbers, check)
