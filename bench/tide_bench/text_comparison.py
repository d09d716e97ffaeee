"""Two continuations of one prompt side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Tokens = Sequence[Sequence[int]]  # [sequences][tokens]


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Where two continuations part; None when one is the beginning of the other."""
    return next((i for i, (a, b) in enumerate(zip(tokens, reference, strict=False)) if a != b), None)


def disagreement_rate(rows: Tokens, references: Tokens) -> float:
    """Chance that a token differs from the reference's where everything before it is the same.

    Rows are followed to their first difference (events over exposure, the estimate of a constant hazard), because behind it
    the texts go their own ways. The first token is left out: it comes from the prompt's full pass.
    """
    counts = [disagreement_events(tokens, reference) for tokens, reference in zip(rows, references, strict=True)]
    exposed = sum(places for _, places in counts)
    return sum(events for events, _ in counts) / exposed if exposed else 0.0


def disagreement_events(tokens: Sequence[int], reference: Sequence[int]) -> tuple[int, int]:
    """Whether one sequence differs from the reference (0 or 1), and after how many tokens behind the first."""
    place = first_difference(tokens[1:], reference[1:])
    return (0, len(tokens) - 1) if place is None else (1, place + 1)


def identical_share(rows: Tokens, references: Tokens) -> float:
    """Share of tokens that are the reference's at the same place of the text."""
    return float(np.mean([a == b for row, other in zip(rows, references, strict=True) for a, b in zip(row, other, strict=True)]))
