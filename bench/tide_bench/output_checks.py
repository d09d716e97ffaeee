"""Two continuations of one prompt side by side, and whether an arm's texts are what it promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from tide_runtime.bundle.manifest import Manifest

from tide_bench.arms import Promise

Tokens = Sequence[Sequence[int]]  # [sequences][tokens]
# Logits closer than this may change places with the order of a sum.
NEAR_TIE = {"fp32": 1e-3, "fp16": 5e-2, "bf16": 5e-1}
_RESAMPLES = 2000

Gap = Callable[[Sequence[int], int, int], float]  # distance of two tokens' logits behind a text


@dataclass(frozen=True)
class Terms:
    """How far texts may be from the model's.

    Args:
        near_tie: a text may part from its reference where two logits are as near as this.
        certified: the share of tokens that may differ from the bundle's full depth, with promise ``certified``; None: nothing was
            certified.
    """

    near_tie: float
    certified: float | None

    @classmethod
    def of(cls, manifest: Manifest) -> Terms:
        certificate = manifest.calibration.certificate if manifest.calibration is not None else None
        if certificate is None:
            return cls(NEAR_TIE[manifest.dtype], None)
        # Both the exit and the full depth may differ from the certificate's reference.
        return cls(NEAR_TIE[manifest.dtype], certificate.max_disagreement + certificate.full_disagreement)


def broken_promise(promise: Promise, prompts: Tokens, texts: Tokens, references: Tokens, gap: Gap, terms: Terms) -> str:
    """Why an arm is not ranked; empty when it keeps its promise.

    Args:
        texts, references: continuations of ``prompts``, [sequences][tokens].
        gap: by the model with every layer.
    """
    if promise == "rounded":
        return ""
    if promise == "certified":
        return _more_than_certified(texts, references, terms.certified)
    for number, (prompt, text, reference) in enumerate(zip(prompts, texts, references, strict=True)):
        place = first_difference(text, reference)
        if place is None:
            continue
        apart = gap([*prompt, *reference[:place]], text[place], reference[place])
        if apart > terms.near_tie:
            return (
                f"says something else: text {number + 1}, new token {place + 1} is {text[place]}, the model's {reference[place]} "
                f"(logits {apart:.2g} apart)"
            )
    return ""


def _more_than_certified(texts: Tokens, references: Tokens, certified: float | None) -> str:
    """Whether the disagreement of a random text is above ``certified`` with 97.5% confidence (bootstrap over texts)."""
    if certified is None:
        return "its thresholds are not certified"
    pairs = np.array([disagreement_events(text, reference) for text, reference in zip(texts, references, strict=True)])
    drawn = pairs[np.random.default_rng(0).integers(0, len(pairs), (_RESAMPLES, len(pairs)))].sum(axis=1)
    rates = drawn[:, 0] / np.maximum(1, drawn[:, 1])
    low = float(np.percentile(rates, 2.5))
    if low > certified:
        return f"differs more often than certified: at least {low:.1%} of tokens, promised at most {certified:.1%}"
    return ""


def first_difference(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """First place where two continuations differ; None when one is the beginning of the other."""
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
