"""Cases of an exact loop's kernels: texts of one to thousands of tokens, finished rows, limits, all sizes of passes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from tide_plugins.conformance.case import (
    TOLERANCE,
    Case,
    CaseSpec,
    Tensors,
    assert_close,
    assert_same,
    rng_for,
    untouched,
)
from tide_plugins.launch.exact_loop_launch import prepare_text_accept, prepare_text_drafts
from tide_plugins.reference import numpy_exact_loop as reference

_MIN_MATCHES = np.array([1, 2, 3, 6, 14], np.int32)
_DRAFTS = 15
_WEIGHT = 4.0


def exact_cases() -> Iterator[CaseSpec]:
    for rows, words, room in product((1, 3, 40), (1, 3, 500), (8, 300, 4400)):
        if rows * room > 20_000:  # the reference compares every token in Python
            continue
        for sizes in (1, 3, 5):
            name = f"drafts-b{rows}-words{words}-room{room}-sizes{sizes}"
            yield CaseSpec("text_drafts", name, partial(_drafts, name, rows, words, room, sizes))
    for rows, power, eos, left in product((1, 5, 300), (0, 2, 4), (0, 2), (1, 7)):
        name = f"accept-b{rows}-tokens{1 << power}-eos{eos}-left{left}"
        yield CaseSpec("text_accept", name, partial(_accept, name, rows, power, eos, left))


def _drafts(name: str, rows: int, words: int, room: int, sizes: int) -> Case:
    rng = rng_for(name)
    length = rng.integers(0, room - 1, rows)
    slots = room + 24
    tries = rng.integers(0, 31, (rows, len(_MIN_MATCHES))).astype(np.int32)
    tensors: Tensors = {
        "text": rng.integers(0, words, (rows, room)).astype(np.int32),
        "length": length,
        "limit": length + rng.integers(1, 40, rows),
        "finished": rng.choice([0, 0, 0, 1], rows).astype(np.uint8),
        "hits": rng.integers(0, tries + 1).astype(np.int32),
        "tries": tries,
        "least": _MIN_MATCHES,
        "prior": (_WEIGHT * np.linspace(0.2, 0.9, len(_MIN_MATCHES))).astype(np.float32),
        "prices": (1 + 0.3 * rng.random() * np.arange(sizes)).astype(np.float32),
        "guess": untouched(rows, _DRAFTS),
        "guessed": untouched(rows),
        "matched": untouched(rows),
        "expected": untouched(rows, sizes, dtype=np.float32),
    }
    tokens = 1 << (sizes - 1)
    tensors |= {name: untouched(rows, tokens, dtype=np.int64) for name in ("input_ids", "position_ids")}
    tensors |= {"position_ids32": untouched(rows, tokens), "write_index": untouched(rows, dtype=np.int64)}
    tensors |= {"write_index32": untouched(rows), "seqlens_k": untouched(rows), "choice": untouched(1)}
    numbers: dict[str, Any] = {"slots": slots, "draft_limit": int(rng.integers(1, 20)), "weight": _WEIGHT}
    expected = reference.text_drafts({key: value.copy() for key, value in tensors.items()}, **numbers)

    def check(out: Tensors) -> None:
        for key, wanted in expected.items():
            if key == "expected":  # a compiler may fuse a product and a sum
                assert_close(key, out[key], wanted, TOLERANCE["f32"])
            else:
                assert_same(key, out[key], wanted.astype(out[key].dtype))

    return Case(prepare_text_drafts, tensors, numbers, check)


def _accept(name: str, rows: int, power: int, eos: int, left: int) -> Case:
    rng = rng_for(name)
    room = 64
    length = rng.integers(0, room - 20, rows)
    tries = rng.integers(0, 32, (rows, len(_MIN_MATCHES))).astype(np.int32)
    tensors: Tensors = {
        "chosen": rng.choice([-1, *[0, 1, 2] * 12], (rows, 1 << power)),
        "choice": np.array([power], np.int32),
        "guess": rng.choice([0, 1, 1, 1, 2], (rows, _DRAFTS)).astype(np.int32),
        "guessed": rng.integers(0, _DRAFTS + 1, rows).astype(np.int32),
        "matched": rng.integers(1, 20, rows).astype(np.int32),
        "least": _MIN_MATCHES,
        "eos": np.array([2, -1][:eos], np.int64),
        "limit": length + rng.integers(2, 30, rows),
        "bound": length + rng.integers(15, 60, rows),
        "text": rng.integers(0, 9, (rows, room)).astype(np.int32),
        "length": length,
        "finished": rng.choice([0, 0, 0, 1, 2, 3], rows).astype(np.uint8),
        "hits": rng.integers(0, tries + 1).astype(np.int32),
        "tries": tries,
        "turns_left": np.array([left], np.int32),
        "ring": untouched(5, rows, _DRAFTS + 2, dtype=np.int64),
        "counts": np.array([13], np.int64),
        "proceed": untouched(1),
    }
    expected = reference.text_accept({key: value.copy() for key, value in tensors.items()})

    def check(out: Tensors) -> None:
        for key, wanted in expected.items():
            assert_same(key, out[key], wanted.astype(out[key].dtype))

    return Case(prepare_text_accept, tensors, {}, check)
