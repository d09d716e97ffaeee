"""The kernels of a decode loop in NumPy, by tensor name: all of csrc but exit_router."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tide_runtime.generation_params import GenerationParams
from tide_runtime.gumbel_noise import GumbelNoise
from tide_runtime.sampling_filters import filter_tokens

Tensors = dict[str, NDArray[Any]]
EXIT_UNIT = 1 << 32  # bits from here on hold the number of the exit that the token took


def take_tokens(tensors: Tensors) -> Tensors:
    """Progress of the rows after their tokens, and which rows go on."""
    runs = tensors["finished"] == 0
    takes = runs & (tensors["chosen"] >= 0)
    length = tensors["length"] + takes
    ends = np.where(np.isin(tensors["chosen"], tensors["eos"]), 1, np.where(length + 1 >= tensors["limit"], 2, 0))
    finished = np.where(takes, ends, np.where(runs, 3, tensors["finished"]))
    last_token = np.where(takes, tensors["chosen"], tensors["last_token"])
    running = (finished == 0).sum(keepdims=True)
    return {"length": length, "last_token": last_token, "finished": finished, "emitted": takes, "running": running}


def loop_turn(tensors: Tensors, slots: int) -> Tensors:
    """Outputs of `loop_turn`."""
    turn = int(tensors["counts"][0])
    ring = tensors["ring"].copy()
    counts = tensors["counts"].copy()
    said = tensors["last_token"] + tensors["exits"] * np.int64(EXIT_UNIT)
    ring[turn % len(ring)] = np.where(tensors["emitted"] > 0, said, -1)
    counts[0] = turn + 1
    left = tensors["turns_left"] - 1
    place = np.minimum(tensors["length"], slots - 1)
    places = {name: place for name in ("position_ids", "position_ids32", "write_index", "write_index32", "seqlens_k")}
    proceed = (tensors["running"] > 0) & (left > 0)
    return {"ring": ring, "counts": counts, "turns_left": left, "input_ids": tensors["last_token"], "proceed": proceed, **places}


def exit_score(tensors: Tensors, mlp_threshold: float) -> Tensors:
    """Probability of the head's token in float64; -1 where the MLP rejects it or there is no token."""
    rows = np.arange(len(tensors["token"]))
    token = np.maximum(tensors["token"], 0)
    logits = tensors["logits"].astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        probability = 1 / np.exp(logits - logits[rows, token][:, None]).sum(-1)
    scored = tensors["token"] >= 0
    if "mlp_score" in tensors:
        scored &= tensors["mlp_score"] >= np.float32(mlp_threshold)
    return {"score": np.where(scored, probability, -1.0)}


def choose_token(tensors: Tensors) -> Tensors:
    """Tokens as `tide_runtime.sampler` chooses them; -1 where the logits are not finite."""
    chosen = tensors["chosen"].copy()
    tokens = len(tensors["chosen"]) // len(tensors["length"])
    for row, logits in enumerate(tensors["logits"].astype(np.float32)):
        sequence = row // tokens
        best = int(np.argmax(logits))
        if tensors["finished"][sequence]:
            continue
        if np.isfinite(logits[best]):
            chosen[row] = best if tensors["temperature"][sequence] == 0 else _drawn(tensors, logits, sequence, row % tokens)
        else:
            chosen[row] = -1
    return {"chosen": chosen}


def _drawn(tensors: Tensors, logits: NDArray[np.float32], sequence: int, token: int) -> int:
    temperature, tail, top_k, min_p = (tensors[name][sequence].item() for name in ("temperature", "tail", "top_k", "min_p"))
    params = GenerationParams(temperature=temperature, top_k=top_k, top_p=1 - tail, min_p=min_p)
    noise = GumbelNoise(0)
    kept = filter_tokens(logits, params)
    noise.key = tensors["key"][sequence]
    position = int(tensors["length"][sequence]) + 1 + token
    return noise.winner(position, logits if kept is None else logits[kept], temperature, kept)


def exit_candidates(tensors: Tensors, exit_count: int, number: int, threshold: float, has_mlp: bool) -> Tensors:
    """Scores of the rows that may take exit ``number``, -1 for the others, and whether there is one."""
    candidate = (tensors["finished"] == 0) & ((number == 1) | (tensors["exits"] == 0))
    if has_mlp:
        candidate &= tensors["score"] >= np.float32(threshold)
    score = np.where(candidate, tensors["score"] if has_mlp else 1, -1)
    counts = tensors["counts"].copy()
    counts[exit_count + number] += candidate.any()
    return {"score": score, "wanted": candidate.any(keepdims=True), "counts": counts}


def exit_join(tensors: Tensors, number: int) -> Tensors:
    """Pending states at exit ``number``, and the newest of each sequence."""
    window = tensors["window"].copy()
    last = tensors["last"].copy()
    waiting = tensors["waiting"]
    for row, arrived in enumerate(_arrivals(tensors, number)):
        first = waiting[number - 1, row]
        window[row, first : first + arrived] = tensors["states"][row, :arrived]
        if arrived:
            last[row] = tensors["states"][row, arrived - 1]
    return {"window": window, "last": last}


def exit_gate(tensors: Tensors, threshold: float, number: int, width: int) -> Tensors:
    """Exit decisions and numbers of pending tokens."""
    runs = tensors["finished"] == 0
    waiting = tensors["waiting"].copy()
    counts = tensors["counts"].copy()
    waiting[number - 1] += _arrivals(tensors, number)
    if number > 1:
        waiting[number - 2] = 0
    before = np.zeros_like(tensors["exits"]) if number == 1 else tensors["exits"]
    leaves = runs & (before == 0) & (tensors["score"] >= np.float32(threshold))
    exits = np.where(leaves, number, before)
    chosen = np.where(leaves, tensors["exit_token"], tensors["chosen"])
    full = waiting[number - 1 :].sum(0) == width
    needs_deeper = runs & ((exits == 0) | (chosen < 0) | full | (tensors["turns_left"] == 1))
    counts[number] += needs_deeper.any()
    return {
        "waiting": waiting,
        "exits": exits,
        "chosen": chosen,
        "deeper": needs_deeper.any(keepdims=True),
        "counts": counts,
    }


def exit_inputs(tensors: Tensors, slots: int, number: int) -> Tensors:
    """Inputs of the layers after exit ``number``, for as few tokens of each row as are pending there."""
    rows = len(tensors["window"])
    waiting = tensors["waiting"][number - 1]
    choice = int(np.ceil(np.log2(max([1, *waiting[tensors["finished"] == 0]]))))
    tokens = 1 << choice
    some = np.clip(waiting, 1, tokens)
    first = np.minimum(tensors["length"] + 1 - some, slots - tokens)
    last = np.arange(rows) * tokens + some - 1
    positions = at_beginning(tensors["position_ids"], first[:, None] + np.arange(tokens))
    return {
        "states": at_beginning(tensors["states"], tensors["window"][:, :tokens]),
        "choice": np.array([choice]),
        **{name: positions for name in ("position_ids", "position_ids32")},
        **{name: first for name in ("write_index", "write_index32")},
        "seqlens_k": first + tokens - 1,
        **{name: last for name in ("logits_index", "logits_index32")},
    }


def at_beginning(before: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
    """``before`` with ``values``, of fewer elements, at its beginning."""
    after = before.copy()
    after.reshape(-1)[: values.size] = values.ravel()
    return after


def exit_merge(tensors: Tensors) -> Tensors:
    """Tokens of the sequences after every layer has run."""
    waiting = tensors["waiting"].copy()
    waiting[-1] = 0
    return {"chosen": np.where(tensors["exits"] > 0, tensors["chosen"], tensors["deep_token"]), "waiting": waiting}


def _arrivals(tensors: Tensors, number: int) -> NDArray[Any]:
    """Number of tokens of each sequence that arrive at exit ``number``."""
    return (tensors["finished"] == 0).astype(np.int32) if number == 1 else tensors["waiting"][number - 2]
