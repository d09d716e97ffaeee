"""The kernels of a decode loop (csrc/{loop_turn,exit_score,exit_gate,exit_merge}.cuh) in NumPy, on arrays by tensor name."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[Any]]
EXITED = 1 << 32  # added to a token that left early


def loop_turn(given: Tensors, slots: int) -> Tensors:
    """What a turn's end writes."""
    turn = int(given["counts"][0])
    ring, counts = given["ring"].copy(), given["counts"].copy()
    said = given["tokens"] + np.where(given["exits"] > 0, EXITED, 0)
    ring[turn % len(ring)] = np.where(given["emitted"] > 0, said, -1)
    counts[0] = turn + 1
    left = given["turns_left"] - 1
    place = np.minimum(given["length"], slots - 1)
    places = {name: place for name in ("position_ids", "position_ids32", "write_index", "write_index32", "seqlens_k")}
    proceed = (given["running"] > 0) & (left > 0)
    return {"ring": ring, "counts": counts, "turns_left": left, "input_ids": given["last_token"], "proceed": proceed, **places}


def exit_score(given: Tensors, mlp_threshold: float) -> Tensors:
    """Probability of the head's token in float64, -1 where it is not asked for or there is none."""
    rows, token = np.arange(len(given["token"])), np.maximum(given["token"], 0)
    logits = given["logits"].astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        probability = 1 / np.exp(logits - logits[rows, token][:, None]).sum(-1)
    asked = given["token"] >= 0
    if "mlp_score" in given:
        asked &= given["mlp_score"] >= np.float32(mlp_threshold)
    return {"score": np.where(asked, probability, -1.0)}


def exit_gate(given: Tensors, slots: int, threshold: float) -> Tensors:
    """Which rows leave, what waits then, and what the deeper layers read."""
    rows, width = given["window"].shape[:2]
    runs, waiting, window = given["finished"] == 0, given["waiting"].copy(), given["window"].copy()
    window[runs, waiting[runs]] = given["hidden"][runs]
    waiting[runs] += 1
    exits = runs & (given["score"] >= np.float32(threshold))
    wants = runs & (~exits | (waiting == width) | (given["turns_left"] == 1))
    first = np.minimum(given["length"] + 1 - np.maximum(waiting, 1), slots - width)
    positions = first[:, None] + np.arange(width)
    chosen = np.arange(rows) * width + np.maximum(waiting, 1) - 1
    return {
        "window": window,
        "waiting": waiting,
        "exits": exits,
        "wants": wants,
        "deeper": wants.any(keepdims=True),
        **{name: positions for name in ("position_ids", "position_ids32")},
        **{name: first for name in ("write_index", "write_index32")},
        "seqlens_k": first + width - 1,
        **{name: chosen for name in ("logits_index", "logits_index32")},
    }


def exit_merge(given: Tensors) -> Tensors:
    """The rows' tokens."""
    ran = given["deeper"][0] != 0
    return {
        "chosen": np.where(given["exits"] > 0, given["exit_token"], given["deep_token"]),
        "waiting": np.zeros_like(given["waiting"]) if ran else given["waiting"],
        "counts": given["counts"] + [0, int(ran)],
    }
