"""The kernels of an exact loop in NumPy, by tensor name: text_drafts and text_accept of csrc."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tide_plugins.reference.numpy_decode_loop import Tensors, at_beginning

MAX_MATCH, MAX_TRIES = 32, 32


def latest_longest_match(text: NDArray[np.int32]) -> tuple[int, int]:
    """Length of the longest end of ``text``, up to 32 tokens, that occurred before, and where its latest occurrence ends."""
    best = 0, 0
    for end in range(1, len(text)):
        length = 0
        while length < min(MAX_MATCH, end) and text[end - 1 - length] == text[len(text) - 1 - length]:
            length += 1
        best = max(best, (length, end))
    return best if best[0] else (0, 0)


def text_drafts(given: Tensors, slots: int, draft_limit: int, weight: float) -> Tensors:
    """Guesses, the size of the next pass, and its inputs."""
    rows = len(given["length"])
    sizes = len(given["prices"])
    drafts = given["guess"].shape[1]
    made = {name: given[name].copy() for name in ("guess", "guessed", "matched", "expected")}
    for row in range(rows):
        size = int(given["length"][row]) + 1
        runs = given["finished"][row] == 0
        text = given["text"][row, :size]
        matched, end = latest_longest_match(text) if runs else (0, 0)
        left = int(given["limit"][row]) - size - 1
        most = max(0, min(draft_limit, drafts, left)) if matched else 0
        made["guess"][row, :most] = [text[end + i % (size - end)] for i in range(most)]
        made["matched"][row], made["guessed"][row] = matched, most
        chances = np.cumprod([_rate(given, row, matched + i, weight) for i in range(most)])
        made["expected"][row] = [float(runs) + chances[: (1 << power) - 1].sum() for power in range(sizes)]
    rates = made["expected"].astype(np.float64).sum(0) / given["prices"]
    tokens = 1 << int(rates.argmax())
    first = np.minimum(given["length"], slots - tokens)
    ids = np.repeat(given["text"][np.arange(rows), given["length"]][:, None], tokens, 1)
    for row, count in enumerate(np.minimum(made["guessed"], tokens - 1)):
        ids[row, 1 : 1 + count] = made["guess"][row, :count]
    positions = first[:, None] + np.arange(tokens)
    return {
        **made,
        "choice": np.array([rates.argmax()]),
        "input_ids": at_beginning(given["input_ids"], ids),
        **{name: at_beginning(given["position_ids"], positions) for name in ("position_ids", "position_ids32")},
        **{name: first for name in ("write_index", "write_index32")},
        "seqlens_k": first + tokens - 1,
    }


def text_accept(given: Tensors) -> Tensors:
    """Texts, progress and statistics of the rows after a pass."""
    made = {name: given[name].copy() for name in ("text", "length", "finished", "hits", "tries", "ring", "counts")}
    turn = int(given["counts"][0])
    tokens = 1 << int(given["choice"][0])
    chosen = given["chosen"].reshape(-1)[: len(given["length"]) * tokens].reshape(-1, tokens)
    for row, choices in enumerate(chosen):
        verified = min(int(given["guessed"][row]), tokens - 1)
        taken = _take(given, made, row, choices, verified)
        entry = made["ring"][turn % len(made["ring"]), row]
        entry[:] = -1
        entry[: 1 + len(taken)] = [verified, *taken]
        size = int(made["length"][row]) + 1
        made["text"][row, size : size + len(taken)] = taken
        made["length"][row] += len(taken)
        _count_hits(given, made, row, taken)
    made["counts"][0] += 1
    left = given["turns_left"] - 1
    runs = made["finished"] == 0
    stops = (made["finished"] == 3) | (runs & (made["length"] + given["guess"].shape[1] + 1 > given["bound"]))
    return {**made, "turns_left": left, "proceed": np.array([runs.any() and not stops.any() and left[0] > 0])}


def _take(given: Tensors, made: Tensors, row: int, choices: NDArray[np.int64], verified: int) -> list[int]:
    """The tokens that a row gets."""
    taken = list[int]()
    while made["finished"][row] == 0:
        token = int(choices[len(taken)])
        if token < 0:
            made["finished"][row] = 3
            break
        accepted = len(taken) < verified and token == given["guess"][row, len(taken)]
        taken.append(token)
        total = given["length"][row] + 1 + len(taken)
        made["finished"][row] = 1 if token in given["eos"] else 2 if total >= given["limit"][row] else 0
        if not accepted:
            break
    return taken


def _count_hits(given: Tensors, made: Tensors, row: int, taken: list[int]) -> None:
    guessed = given["guess"][row, : given["guessed"][row]]
    for i, (guess, token) in enumerate(zip(guessed, taken, strict=False)):
        at = row, _class_of(given, int(given["matched"][row]) + i)
        halves = made["tries"][at] + 1 == MAX_TRIES
        made["tries"][at], made["hits"][at] = (made["tries"][at] + 1) >> halves, (made["hits"][at] + (guess == token)) >> halves
        if guess != token:
            break


def _rate(given: Tensors, row: int, matched: int, weight: float) -> float:
    found = _class_of(given, matched)
    return float((given["hits"][row, found] + given["prior"][found]) / (given["tries"][row, found] + np.float32(weight)))


def _class_of(given: Tensors, matched: int) -> int:
    return max(0, int(np.searchsorted(given["least"], matched, "right")) - 1)
