"""How often the guesses of a drafter are right on the model's replies, and which of its forms guesses best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import DynamicCache

from tide_export.drafters.base import Drafter, LoadedDrafter, MeasuredDrafter
from tide_export.drafters.replies import Replies

GUESSES = 4
_SCORES = (0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)
_CLASS_WEIGHT = 10.0  # guesses that the share of all counts as, in a class
_TEXTS = 2  # whose logits are held at once


class GuessRecord:
    """Counts guesses, and those that are right: by how many right ones came before, and by score."""

    def __init__(self, places: int = GUESSES) -> None:
        self._hits, self._tries = np.zeros(places), np.zeros(places)
        self._scores = list[NDArray[np.float32]]()
        self._rights = list[NDArray[np.bool_]]()

    def add(self, place: int, scores: Tensor, rights: Tensor, counted: Tensor) -> None:
        """Guesses behind ``place`` right ones: their largest probabilities, whether they are right, whether they count."""
        self._hits[place] += int((rights & counted).sum())
        self._tries[place] += int(counted.sum())
        self._scores.append(scores[counted].float().cpu().numpy())
        self._rights.append(rights[counted].cpu().numpy())

    @property
    def acceptance(self) -> list[float]:
        """Share of the 1st, 2nd, … guesses that are right, as far as there are enough of them."""
        shares = [
            round(float(hits / tries), 4) for hits, tries in zip(self._hits, self._tries, strict=True) if tries >= _CLASS_WEIGHT
        ]
        return shares or [round(self._overall, 4)]

    @property
    def classes(self) -> list[list[float]]:
        """[score, share]: of the guesses with at least this score, and less than the next, that are right."""
        scores, rights = np.concatenate(self._scores), np.concatenate(self._rights)
        classes = []
        for low, high in zip(_SCORES, (*_SCORES[1:], 2.0), strict=True):
            own = rights[(scores >= low) & (scores < high)]
            share = (float(own.sum()) + _CLASS_WEIGHT * self._overall) / (len(own) + _CLASS_WEIGHT)
            classes.append([low, round(share, 4)])
        return classes

    @property
    def _overall(self) -> float:
        rights = np.concatenate(self._rights)
        return float(rights.mean()) if len(rights) else 0.0


def tokens_per_pass(acceptance: Sequence[float]) -> float:
    """Tokens that a verification of as many guesses gives: its own and those accepted."""
    return 1.0 + float(np.cumprod(acceptance).sum())


def chain(drafter: Drafter, tapped: Tensor, ids: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [B, P, N] and states [B, P, D] of the 1st, 2nd, … guess from each of the first P = T - ``length`` tokens.

    The guess number k (from 0) of place p is of token p + 2 + k, and reads token p + 1 + k of ``ids`` [B, T]; ``tapped``
    [B, T, …] are the model's states. Its attention sees what it sees in use: the pairs up to p with the model's states, and those
    of its own chain behind.
    """
    places = ids.shape[1] - length
    before = drafter.fuse(tapped[:, :places])
    embedded = drafter.embedded(ids)
    cache = DynamicCache()
    lowest = torch.finfo(before.dtype).min
    seen = torch.full((places, places), lowest, dtype=before.dtype)
    masks = [seen.triu(1)]
    for ahead in range(length):
        positions = torch.arange(ahead, ahead + places)[None].expand(len(ids), -1)
        mask = torch.cat(masks, -1)[None, None]
        logits, before = drafter(embedded[:, 1 + ahead : 1 + ahead + places], before, positions, cache, mask)
        yield logits, before
        masks.append(seen.masked_fill(torch.eye(places, dtype=torch.bool), 0.0))


@torch.inference_mode()
def measure(drafter: Drafter, replies: Replies) -> GuessRecord:
    """How often guesses are the model's likeliest token, while all guesses before are right and the text goes on with them."""
    record = GuessRecord()
    tapped = torch.cat([replies.states[tap] for tap in drafter.taps], -1)
    length = replies.ids.shape[1]
    places = torch.arange(length - GUESSES)
    for start in range(0, len(replies.ids), _TEXTS):
        rows = slice(start, start + _TEXTS)
        ids = replies.ids[rows]
        argmax = replies.argmax[rows]
        ends = replies.ends[rows, None]
        on_text = torch.ones((len(ids), len(places)), dtype=torch.bool)
        for ahead, (logits, _) in enumerate(chain(drafter, tapped[rows], ids, GUESSES)):
            best = logits.float().softmax(-1).max(-1)
            read = places + 1 + ahead  # the token read; the guess is of the next one
            right = drafter.vocabulary[best.indices] == argmax[:, read]
            counted = on_text & (read + 1 >= replies.first) & (read + 1 < ends)
            record.add(ahead, best.values, right, counted)
            following = ids[:, (read + 1).clamp(max=length - 1)]
            on_text = counted & right & (following == argmax[:, read])
    return record


def in_best_form(found: LoadedDrafter, replies: Replies) -> MeasuredDrafter:
    """The drafter in the form that gives most tokens per verification, of equal ones the first. ``replies`` hold all taps."""
    drafter = found.drafter
    records = {}
    tried = {}
    for form in found.forms:
        form.apply(drafter)
        records[form.name] = measure(drafter, replies)
        tried[form.name] = round(tokens_per_pass(records[form.name].acceptance), 4)
    best = max(found.forms, key=lambda form: tried[form.name])
    best.apply(drafter)
    record = records[best.name]
    return MeasuredDrafter(drafter, record.acceptance, record.classes, best.name, tried, found.source, found.sha256)
