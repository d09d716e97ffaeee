"""Synthetic documents whose exits disagree more in some documents than in others: the true rates are known."""

from __future__ import annotations

import numpy as np
from tide_calibrate.traces.trace import ExitTrace, SplitTrace

LAYERS = 24
EXITS = [(6, "identity", "max_probability"), (12, "identity", "max_probability")]


def synthetic_trace(documents: int, scatter: float, seed: int, tokens: int = 400) -> SplitTrace:
    """``documents`` of ``tokens`` tokens in the median, lengths log-normal.

    A token's score is its chance to agree in a typical document; the document's own level, normal with standard deviation
    ``scatter`` in logits, shifts the chance of all its tokens. With scatter 0 tokens are independent.
    """
    random = np.random.default_rng(seed)
    lengths = np.maximum(20, tokens * np.exp(random.normal(0, 0.7, documents))).astype(np.int64)
    document = np.repeat(np.arange(documents, dtype=np.int32), lengths)
    level = np.repeat(random.normal(0, scatter, documents), lengths)
    ease = random.normal(1.0, 2.0, len(document))
    exits = {}
    for checkpoint, head, router in EXITS:
        score = ease + checkpoint / 6 + random.normal(0, 0.5, len(document))
        agrees = random.random(len(document)) < 1 / (1 + np.exp(-score - level))
        scores = {router: (1 / (1 + np.exp(-score))).astype(np.float32)}
        exits[checkpoint, head] = ExitTrace(checkpoint, head, agrees, np.zeros(len(document), np.float32), scores)
    return SplitTrace(document, document, np.zeros(len(document), np.float32), exits, LAYERS)
