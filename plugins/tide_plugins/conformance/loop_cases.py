"""Cases of a decode loop's kernels: one row to more than a block's threads, finished rows, full windows, last turns, NaN scores,
vocabularies of one token to several blocks, non-finite logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
from tide_plugins.launch.decode_loop_launch import (
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
from tide_plugins.reference import numpy_decode_loop as reference

_SLOTS = 64
_THRESHOLD = 0.5
_ROWS = (1, 3, 32, 300)
_EXITS, _WIDTH = 3, 4
_PLACES = {"write_index": np.int64, "write_index32": np.int32, "seqlens_k": np.int32}


def loop_cases() -> Iterator[CaseSpec]:
    for rows, left in product(_ROWS, (1, 2, 9)):
        for running in (0, rows):
            name = f"b{rows}-left{left}-running{running}"
            yield CaseSpec("loop_turn", name, partial(_turn, name, rows, left, running))
        for number in range(1, _EXITS + 1):
            name = f"b{rows}-left{left}-exit{number}"
            yield CaseSpec("exit_gate", name, partial(_gate, name, rows, left, number))
    for rows, number, row_bytes in product(_ROWS, range(1, _EXITS + 1), (24, 4096)):
        name = f"b{rows}-exit{number}-bytes{row_bytes}"
        yield CaseSpec("exit_join", name, partial(_join, name, rows, number, row_bytes))
        name = f"inputs-{name}"
        yield CaseSpec("exit_inputs", name, partial(_inputs, name, rows, number, row_bytes))
    for rows, number, mlp in product(_ROWS, (1, 2), (False, True)):
        name = f"b{rows}-exit{number}-mlp{int(mlp)}"
        yield CaseSpec("exit_candidates", name, partial(_candidates, name, rows, number, mlp))
    # One block to several per row; rows that begin on 16 bytes and that do not.
    for dtype, vocab, mlp in product(ELEMENTS, (1, 33, 1000, 9001), (False, True)):
        name = f"exit_score-{dtype}-v{vocab}-mlp{int(mlp)}"
        yield CaseSpec("exit_score", name, partial(_score, name, dtype, vocab, mlp))
    # One block to several per row, every mix of filters, tokens in a row; logits with and without many equals.
    for dtype, vocab, tokens, spread in product(ELEMENTS, (1, 33, 1000, 9001, 33_000), (1, 3), (0.3, 4.0)):
        name = f"choose_token-{dtype}-v{vocab}-s{tokens}-x{spread}"
        yield CaseSpec("choose_token", name, partial(_choose, name, dtype, vocab, tokens, spread))
    for rows, eos in product(_ROWS, (0, 3)):
        name = f"b{rows}-eos{eos}"
        yield CaseSpec("take_tokens", name, partial(_take, name, rows, eos))
    for rows in _ROWS:
        yield CaseSpec("exit_merge", f"b{rows}", partial(_merge, f"b{rows}", rows))


def _turn(name: str, rows: int, left: int, running: int) -> Case:
    rng = rng_for(name)
    tensors: Tensors = {
        "emitted": rng.integers(0, 2, rows).astype(np.int32),
        "exits": rng.integers(0, _EXITS + 1, rows).astype(np.uint8),
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
    return _case(prepare_loop_turn, tensors, outputs, {"slots": _SLOTS}, reference.loop_turn)


def _take(name: str, rows: int, eos: int) -> Case:
    """Tokens, of which some are -1 or end their row; rows at their limit, one and two tokens before it; finished rows."""
    rng = rng_for(name)
    length = rng.integers(1, 2**33, rows)
    tensors: Tensors = {
        "chosen": rng.integers(-1, 8, rows),
        "eos": np.array([3, 5, -1][:eos], np.int64),
        "limit": length + rng.integers(1, 5, rows),
        "length": length,
        "last_token": rng.integers(0, 8, rows),
        "finished": rng.choice([0, 0, 0, 0, 1, 2, 3], rows).astype(np.uint8),
    }
    outputs = {"emitted": untouched(rows), "running": untouched(1)}
    return _case(prepare_take_tokens, tensors, outputs, {}, reference.take_tokens)


def _gate(name: str, rows: int, left: int, number: int) -> Case:
    rng = rng_for(name)
    score = rng.random(rows).astype(np.float32)
    score[rng.random(rows) < 0.2] = np.nan
    score[rng.random(rows) < 0.2] = _THRESHOLD
    tensors: Tensors = {
        **_rows_at(rng, rows, number),
        "score": score,
        "exit_token": rng.choice([-1, 5, 2**31], rows),
        "turns_left": np.array([left], np.int32),
        "exits": rng.integers(0, number, rows).astype(np.uint8),
        "chosen": rng.choice([-1, 7, 2**31], rows),
        "counts": np.arange(2 * _EXITS + 1),
    }
    numbers = {"threshold": _THRESHOLD, "number": number, "width": _WIDTH}
    return _case(prepare_exit_gate, tensors, {"deeper": untouched(1)}, numbers, reference.exit_gate)


def _inputs(name: str, rows: int, number: int, row_bytes: int) -> Case:
    rng = rng_for(name)
    tensors: Tensors = {
        "finished": rng.choice([0, 0, 0, 1], rows).astype(np.uint8),
        "length": rng.integers(_WIDTH, _SLOTS + 1, rows),
        "waiting": rng.integers(0, rng.integers(1, _WIDTH + 1) + 1, (_EXITS, rows)).astype(np.int32),
        "window": _bytes(rng, rows, _WIDTH, row_bytes),
        "states": _bytes(rng, rows, _WIDTH, row_bytes),
    }
    outputs = {"position_ids": untouched(rows, _WIDTH, dtype=np.int64), "position_ids32": untouched(rows, _WIDTH)}
    outputs |= {n: untouched(rows, dtype=kind) for n, kind in _PLACES.items()} | {"choice": untouched(1)}
    outputs |= {"logits_index": untouched(rows, dtype=np.int64), "logits_index32": untouched(rows)}
    return _case(prepare_exit_inputs, tensors, outputs, {"slots": _SLOTS, "number": number}, reference.exit_inputs)


def _candidates(name: str, rows: int, number: int, mlp: bool) -> Case:
    rng = rng_for(name)
    score = rng.random(rows).astype(np.float32)
    score[rng.random(rows) < 0.2] = np.nan
    score[rng.random(rows) < 0.2] = _THRESHOLD
    tensors: Tensors = {
        "finished": rng.choice([0, 0, 0, 1], rows).astype(np.uint8),
        "exits": rng.integers(0, _EXITS + 1, rows).astype(np.uint8),
        "score": score,
        "counts": np.arange(2 * _EXITS + 1),
    }
    numbers = {"exit_count": _EXITS, "number": number, "threshold": _THRESHOLD, "has_mlp": mlp}
    return _case(prepare_exit_candidates, tensors, {"wanted": untouched(1)}, numbers, reference.exit_candidates)


def _join(name: str, rows: int, number: int, row_bytes: int) -> Case:
    rng = rng_for(name)
    arriving = 1 if number == 1 else _WIDTH
    tensors: Tensors = {
        **_rows_at(rng, rows, number),
        "states": _bytes(rng, rows, arriving, row_bytes),
        "window": _bytes(rng, rows, _WIDTH, row_bytes),
        "last": _bytes(rng, rows, row_bytes),
    }
    return _case(prepare_exit_join, tensors, {}, {"number": number}, reference.exit_join)


def _rows_at(rng: np.random.Generator, rows: int, number: int) -> Tensors:
    """State of rows at exit ``number``, where the tokens pending at the previous exit arrive and none are pending before.

    At most `_WIDTH` tokens of a row are pending.
    """
    finished = rng.choice([0, 0, 0, 1], rows).astype(np.uint8)
    waiting = np.zeros((_EXITS, rows), np.int32)
    room = np.full(rows, _WIDTH)
    if number == 1:
        room -= finished == 0  # for the arriving token
    else:
        waiting[number - 2] = rng.integers((finished == 0).astype(int), _WIDTH + 1)
        room -= waiting[number - 2]
    for later in range(number - 1, _EXITS):
        waiting[later] = rng.integers(0, room + 1)
        room -= waiting[later]
    return {"finished": finished, "waiting": waiting}


def _bytes(rng: np.random.Generator, *shape: int) -> NDArray[np.uint8]:
    return rng.integers(0, 256, shape).astype(np.uint8)


def _score(name: str, dtype: str, vocab: int, mlp: bool, rows: int = 24) -> Case:
    """A case of exit_score. ``mlp``: the MLP's scores and the result share memory, as in the loop."""
    rng = rng_for(name)
    logits = matrix(6 * rng.standard_normal((rows, vocab)), dtype)
    token = logits.astype(np.float32).argmax(-1)
    token[rng.random(rows) < 0.2] = -1
    mlp_score = rng.random(rows).astype(np.float32)
    mlp_score[rng.random(rows) < 0.2] = np.nan
    mlp_score[rng.random(rows) < 0.2] = _THRESHOLD
    score = mlp_score if mlp else untouched(rows, dtype=np.float32)
    tensors: Tensors = {"logits": logits, "token": token, "score": score} | ({"mlp_score": score} if mlp else {})
    wanted = reference.exit_score({k: v.copy() for k, v in tensors.items()}, _THRESHOLD)["score"]
    numbers = {"mlp_threshold": _THRESHOLD}
    return Case(prepare_exit_score, tensors, numbers, lambda out: assert_close("score", out["score"], wanted, TOLERANCE["f32"]))


def _choose(name: str, dtype: str, vocab: int, tokens: int, spread: float, sequences: int = 8) -> Case:
    """Sequences of other settings each, of which one is greedy, one finished and one has logits that are not finite."""
    rng = rng_for(name)
    logits = matrix(spread * rng.standard_normal((sequences * tokens, vocab)), dtype)
    logits[-1, rng.integers(vocab)] = rng.choice([np.nan, np.inf])
    tensors: Tensors = {
        "logits": logits,
        "temperature": np.array([0, *rng.choice([0.1, 0.7, 1.0, 2.0], sequences - 1)], np.float32),
        "top_k": rng.choice([0, 0, 1, 20, 500], sequences).astype(np.int32),
        "tail": rng.choice([0, 0.05, 0.1, 0.7], sequences).astype(np.float32),
        "min_p": rng.choice([0, 0, 0.1, 1], sequences).astype(np.float32),
        "key": rng.integers(0, 2**64, (sequences, 2), np.uint64),
        "length": rng.integers(0, 2**33, sequences),
        "finished": np.array([*[0] * (sequences - 2), 1, 0], np.uint8),
        "chosen": untouched(sequences * tokens, dtype=np.int64),
    }
    wanted = reference.choose_token({key: value.copy() for key, value in tensors.items()})["chosen"]

    def check(out: Tensors) -> None:
        in_doubt = (out["chosen"] == -1) & (wanted != -1) & (np.arange(sequences * tokens) >= tokens)
        assert in_doubt.sum() <= 1, f"{in_doubt.sum()} tokens are left to the host"
        assert_same("chosen", out["chosen"], np.where(in_doubt, -1, wanted))

    return Case(prepare_choose_token, tensors, {}, check)


def _merge(name: str, rows: int) -> Case:
    rng = rng_for(name)
    tensors: Tensors = {
        "exits": rng.integers(0, _EXITS + 1, rows).astype(np.uint8),
        "deep_token": rng.integers(-1, 2**31, rows),
        "chosen": rng.integers(0, 2**31, rows),
        "waiting": np.stack([*np.zeros((_EXITS - 1, rows), np.int32), rng.integers(0, _WIDTH, rows).astype(np.int32)]),
    }
    return _case(prepare_exit_merge, tensors, {}, {}, reference.exit_merge)


def _case(
    prepare: Callable[..., Any],
    tensors: Tensors,
    outputs: Tensors,
    numbers: dict[str, Any],
    expected: Callable[..., Tensors],
) -> Case:
    """A case with bitwise comparison."""
    before = {name: tensor.copy() for name, tensor in (tensors | outputs).items()}

    def check(out: Tensors) -> None:
        for name, wanted in expected(before, **numbers).items():
            assert_same(name, out[name], wanted.astype(out[name].dtype))

    return Case(prepare, tensors | outputs, numbers, check)
