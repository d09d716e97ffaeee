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


def text_drafts(tensors: Tensors, slots: int, draft_limit: int, weight: float) -> Tensors:
    """Guesses, the size of the next pass, and its inputs."""
    rows = len(tensors["length"])
    sizes = len(tensors["prices"])
    drafts = tensors["guess"].shape[1]
    outputs = {name: tensors[name].copy() for name in ("guess", "guessed", "matched", "expected")}
    for row in range(rows):
        size = int(tensors["length"][row]) + 1
        runs = tensors["finished"][row] == 0
        text = tensors["text"][row, :size]
        matched, end = latest_longest_match(text) if runs else (0, 0)
        left = int(tensors["limit"][row]) - size - 1
        most = max(0, min(draft_limit, drafts, left)) if matched else 0
        outputs["guess"][row, :most] = [text[end + i % (size - end)] for i in range(most)]
        outputs["matched"][row], outputs["guessed"][row] = matched, most
        chances = np.cumprod([_rate(tensors, row, matched + i, weight) for i in range(most)])
        outputs["expected"][row] = [float(runs) + chances[: (1 << power) - 1].sum() for power in range(sizes)]
    rates = outputs["expected"].astype(np.float64).sum(0) / tensors["prices"]
    tokens = 1 << int(rates.argmax())
    first = np.minimum(tensors["length"], slots - tokens)
    ids = np.repeat(tensors["text"][np.arange(rows), tensors["length"]][:, None], tokens, 1)
    for row, count in enumerate(np.minimum(outputs["guessed"], tokens - 1)):
        ids[row, 1 : 1 + count] = outputs["guess"][row, :count]
    positions = first[:, None] + np.arange(tokens)
    return {
        **outputs,
        "choice": np.array([rates.argmax()]),
        "input_ids": at_beginning(tensors["input_ids"], ids),
        **{name: at_beginning(tensors["position_ids"], positions) for name in ("position_ids", "position_ids32")},
        **{name: first for name in ("write_index", "write_index32")},
        "seqlens_k": first + tokens - 1,
    }


def text_accept(tensors: Tensors) -> Tensors:
    """Texts, progress and statistics of the rows after a pass."""
    outputs = {name: tensors[name].copy() for name in ("text", "length", "finished", "hits", "tries", "ring", "counts")}
    turn = int(tensors["counts"][0])
    tokens = 1 << int(tensors["choice"][0])
    chosen = tensors["chosen"].reshape(-1)[: len(tensors["length"]) * tokens].reshape(-1, tokens)
    for row, choices in enumerate(chosen):
        verified = min(int(tensors["guessed"][row]), tokens - 1)
        taken = _take(tensors, outputs, row, choices, verified)
        entry = outputs["ring"][turn % len(outputs["ring"]), row]
        entry[:] = -1
        entry[: 1 + len(taken)] = [verified, *taken]
        size = int(outputs["length"][row]) + 1
        outputs["text"][row, size : size + len(taken)] = taken
        outputs["length"][row] += len(taken)
        _count_hits(tensors, outputs, row, taken)
    outputs["counts"][0] += 1
    left = tensors["turns_left"] - 1
    runs = outputs["finished"] == 0
    stops = (outputs["finished"] == 3) | (runs & (outputs["length"] + tensors["guess"].shape[1] + 1 > tensors["bound"]))
    return {**outputs, "turns_left": left, "proceed": np.array([runs.any() and not stops.any() and left[0] > 0])}


def _take(tensors: Tensors, outputs: Tensors, row: int, choices: NDArray[np.int64], verified: int) -> list[int]:
    """The tokens that a row gets."""
    taken = list[int]()
    while outputs["finished"][row] == 0:
        token = int(choices[len(taken)])
        if token < 0:
            outputs["finished"][row] = 3
            break
        accepted = len(taken) < verified and token == tensors["guess"][row, len(taken)]
        taken.append(token)
        total = tensors["length"][row] + 1 + len(taken)
        outputs["finished"][row] = 1 if token in tensors["eos"] else 2 if total >= tensors["limit"][row] else 0
        if not accepted:
            break
    return taken


def _count_hits(tensors: Tensors, outputs: Tensors, row: int, taken: list[int]) -> None:
    guessed = tensors["guess"][row, : tensors["guessed"][row]]
    for i, (guess, token) in enumerate(zip(guessed, taken, strict=False)):
        at = row, _class_of(tensors, int(tensors["matched"][row]) + i)
        halves = outputs["tries"][at] + 1 == MAX_TRIES
        outputs["tries"][at] = (outputs["tries"][at] + 1) >> halves
        outputs["hits"][at] = (outputs["hits"][at] + (guess == token)) >> halves
        if guess != token:
            break


def _rate(tensors: Tensors, row: int, matched: int, weight: float) -> float:
    found = _class_of(tensors, matched)
    return float((tensors["hits"][row, found] + tensors["prior"][found]) / (tensors["tries"][row, found] + np.float32(weight)))


def _class_of(tensors: Tensors, matched: int) -> int:
    return max(0, int(np.searchsorted(tensors["least"], matched, "right")) - 1)
