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


def take_tokens(given: Tensors) -> Tensors:
    """Progress of the rows after their tokens, and which rows go on."""
    runs = given["finished"] == 0
    takes = runs & (given["chosen"] >= 0)
    length = given["length"] + takes
    ends = np.where(np.isin(given["chosen"], given["eos"]), 1, np.where(length + 1 >= given["limit"], 2, 0))
    finished = np.where(takes, ends, np.where(runs, 3, given["finished"]))
    last_token = np.where(takes, given["chosen"], given["last_token"])
    running = (finished == 0).sum(keepdims=True)
    return {"length": length, "last_token": last_token, "finished": finished, "emitted": takes, "running": running}


def loop_turn(given: Tensors, slots: int) -> Tensors:
    """Outputs of `loop_turn`."""
    turn = int(given["counts"][0])
    ring = given["ring"].copy()
    counts = given["counts"].copy()
    said = given["last_token"] + given["exits"] * np.int64(EXIT_UNIT)
    ring[turn % len(ring)] = np.where(given["emitted"] > 0, said, -1)
    counts[0] = turn + 1
    left = given["turns_left"] - 1
    place = np.minimum(given["length"], slots - 1)
    places = {name: place for name in ("position_ids", "position_ids32", "write_index", "write_index32", "seqlens_k")}
    proceed = (given["running"] > 0) & (left > 0)
    return {"ring": ring, "counts": counts, "turns_left": left, "input_ids": given["last_token"], "proceed": proceed, **places}


def exit_score(given: Tensors, mlp_threshold: float) -> Tensors:
    """Probability of the head's token in float64; -1 where the MLP rejects it or there is no token."""
    rows = np.arange(len(given["token"]))
    token = np.maximum(given["token"], 0)
    logits = given["logits"].astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        probability = 1 / np.exp(logits - logits[rows, token][:, None]).sum(-1)
    scored = given["token"] >= 0
    if "mlp_score" in given:
        scored &= given["mlp_score"] >= np.float32(mlp_threshold)
    return {"score": np.where(scored, probability, -1.0)}


def choose_token(given: Tensors) -> Tensors:
    """Tokens as `tide_runtime.sampler` chooses them; -1 where the logits are not finite."""
    chosen = given["chosen"].copy()
    tokens = len(given["chosen"]) // len(given["length"])
    for row, logits in enumerate(given["logits"].astype(np.float32)):
        sequence = row // tokens
        best = int(np.argmax(logits))
        if given["finished"][sequence]:
            continue
        if np.isfinite(logits[best]):
            chosen[row] = best if given["temperature"][sequence] == 0 else _drawn(given, logits, sequence, row % tokens)
        else:
            chosen[row] = -1
    return {"chosen": chosen}


def _drawn(given: Tensors, logits: NDArray[np.float32], sequence: int, token: int) -> int:
    temperature, tail, top_k, min_p = (given[name][sequence].item() for name in ("temperature", "tail", "top_k", "min_p"))
    params = GenerationParams(temperature=temperature, top_k=top_k, top_p=1 - tail, min_p=min_p)
    noise = GumbelNoise(0)
    kept = filter_tokens(logits, params)
    noise.key = given["key"][sequence]
    position = int(given["length"][sequence]) + 1 + token
    return noise.winner(position, logits if kept is None else logits[kept], temperature, kept)


def exit_candidates(given: Tensors, exit_count: int, number: int, threshold: float, has_mlp: bool) -> Tensors:
    """Scores of the rows that may take exit ``number``, -1 for the others, and whether there is one."""
    candidate = (given["finished"] == 0) & ((number == 1) | (given["exits"] == 0))
    if has_mlp:
        candidate &= given["score"] >= np.float32(threshold)
    score = np.where(candidate, given["score"] if has_mlp else 1, -1)
    counts = given["counts"].copy()
    counts[exit_count + number] += candidate.any()
    return {"score": score, "wanted": candidate.any(keepdims=True), "counts": counts}


def exit_join(given: Tensors, number: int) -> Tensors:
    """Pending states at exit ``number``, and the newest of each sequence."""
    window = given["window"].copy()
    last = given["last"].copy()
    waiting = given["waiting"]
    for row, arrived in enumerate(_arrivals(given, number)):
        first = waiting[number - 1, row]
        window[row, first : first + arrived] = given["states"][row, :arrived]
        if arrived:
            last[row] = given["states"][row, arrived - 1]
    return {"window": window, "last": last}


def exit_gate(given: Tensors, threshold: float, number: int, width: int) -> Tensors:
    """Exit decisions and numbers of pending tokens."""
    runs = given["finished"] == 0
    waiting = given["waiting"].copy()
    counts = given["counts"].copy()
    waiting[number - 1] += _arrivals(given, number)
    if number > 1:
        waiting[number - 2] = 0
    before = np.zeros_like(given["exits"]) if number == 1 else given["exits"]
    leaves = runs & (before == 0) & (given["score"] >= np.float32(threshold))
    exits = np.where(leaves, number, before)
    chosen = np.where(leaves, given["exit_token"], given["chosen"])
    full = waiting[number - 1 :].sum(0) == width
    needs_deeper = runs & ((exits == 0) | (chosen < 0) | full | (given["turns_left"] == 1))
    counts[number] += needs_deeper.any()
    return {
        "waiting": waiting,
        "exits": exits,
        "chosen": chosen,
        "deeper": needs_deeper.any(keepdims=True),
        "counts": counts,
    }


def exit_inputs(given: Tensors, slots: int, number: int) -> Tensors:
    """Inputs of the layers after exit ``number``, for as few tokens of each row as are pending there."""
    rows = len(given["window"])
    waiting = given["waiting"][number - 1]
    choice = int(np.ceil(np.log2(max([1, *waiting[given["finished"] == 0]]))))
    tokens = 1 << choice
    some = np.clip(waiting, 1, tokens)
    first = np.minimum(given["length"] + 1 - some, slots - tokens)
    last = np.arange(rows) * tokens + some - 1
    positions = at_beginning(given["position_ids"], first[:, None] + np.arange(tokens))
    return {
        "states": at_beginning(given["states"], given["window"][:, :tokens]),
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


def exit_merge(given: Tensors) -> Tensors:
    """Tokens of the sequences after every layer has run."""
    waiting = given["waiting"].copy()
    waiting[-1] = 0
    return {"chosen": np.where(given["exits"] > 0, given["chosen"], given["deep_token"]), "waiting": waiting}


def _arrivals(given: Tensors, number: int) -> NDArray[Any]:
    """Number of tokens of each sequence that arrive at exit ``number``."""
    return (given["finished"] == 0).astype(np.int32) if number == 1 else given["waiting"][number - 2]
