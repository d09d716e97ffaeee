"""Outputs of exit heads and routers on every token of a text: the input of thresholds, placement and report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tide_export.calibration.calibration_file import HeadAgreement

Exit = tuple[int, str]  # checkpoint, kind of head


@dataclass(frozen=True)
class ExitTrace:
    """Outputs of one exit head after ``checkpoint`` layers, on n tokens in text order.

    Args:
        checkpoint: layers run before the exit.
        head: ``identity``, ``linear`` or ``tail:k``.
        agrees: [n] bool, the head's likeliest token is the full model's, or the reference's where the trace has one.
        nll: [n] float32, the head's negative log-likelihood (nats) of the text's next token; NaN at a window's end.
        scores: router name (``mlp``, ``max_probability``, ``entropy``, ``cosine``, …) → [n] float32, higher is more confident.
    """

    checkpoint: int
    head: str
    agrees: NDArray[np.bool_]
    nll: NDArray[np.float32]
    scores: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def select(self, kept: NDArray) -> ExitTrace:
        """Restrict the trace to some tokens: a mask [n] or indices."""
        scores = {name: values[kept] for name, values in self.scores.items()}
        return replace(self, agrees=self.agrees[kept], nll=self.nll[kept], scores=scores)

    def joined(self, other: ExitTrace) -> ExitTrace:
        """Concatenate this trace's tokens with those of ``other``, a trace of the same exit."""
        scores = {name: np.concatenate([values, other.scores[name]]) for name, values in self.scores.items()}
        agrees = np.concatenate([self.agrees, other.agrees])
        nll = np.concatenate([self.nll, other.nll])
        return replace(self, agrees=agrees, nll=nll, scores=scores)


@dataclass(frozen=True)
class SplitTrace:
    """Traces of several exits on the same n tokens.

    Args:
        window, document: [n] int32, indices of each token's window and document; tokens of a window are consecutive, in order.
        full_nll: [n] float32, the full model's negative log-likelihood (nats) of the text's next token; NaN at a window's end.
        exits: (checkpoint, head) → its trace.
        num_layers: L.
        full_agrees: [n] bool, the full model's likeliest token is the reference's; None where the full model is the reference.
    """

    window: NDArray[np.int32]
    document: NDArray[np.int32]
    full_nll: NDArray[np.float32]
    exits: dict[Exit, ExitTrace]
    num_layers: int
    full_agrees: NDArray[np.bool_] | None = None

    def select(self, kept: NDArray) -> SplitTrace:
        """Restrict the trace to some tokens: a mask [n] or ascending indices."""
        exits = {key: trace.select(kept) for key, trace in self.exits.items()}
        window = self.window[kept]
        document = self.document[kept]
        full_nll = self.full_nll[kept]
        full_agrees = None if self.full_agrees is None else self.full_agrees[kept]
        return replace(self, window=window, document=document, full_nll=full_nll, exits=exits, full_agrees=full_agrees)

    def only(self, exits: Iterable[Exit]) -> SplitTrace:
        """Restrict the trace to some exits."""
        return replace(self, exits={key: self.exits[key] for key in exits})

    def with_exits(self, other: SplitTrace) -> SplitTrace:
        """A copy that has the exits of ``other``, a trace of the same tokens, and those of its own that ``other`` lacks."""
        return replace(self, exits=self.exits | other.exits)

    def joined(self, other: SplitTrace) -> SplitTrace:
        """Concatenate this trace's tokens with those of ``other``, which has the same exits and reference, and other windows."""
        agrees = None
        if self.full_agrees is not None and other.full_agrees is not None:
            agrees = np.concatenate([self.full_agrees, other.full_agrees])
        return replace(
            self,
            window=np.concatenate([self.window, other.window]),
            document=np.concatenate([self.document, other.document]),
            full_nll=np.concatenate([self.full_nll, other.full_nll]),
            exits={key: trace.joined(other.exits[key]) for key, trace in self.exits.items()},
            full_agrees=agrees,
        )


def agreement_by_depth(text: SplitTrace, continuations: SplitTrace | None) -> list[HeadAgreement]:
    """Agreement of every head at every checkpoint, in the order in which the heads appear in ``text``."""
    lines = []
    for head in dict.fromkeys(head for _, head in text.exits):
        checkpoints = sorted(layer for layer, name in text.exits if name == head)
        on_text = [_share(text, layer, head) for layer in checkpoints]
        on_own = [_share(continuations, layer, head) for layer in checkpoints] if continuations is not None else []
        lines.append(HeadAgreement(head, checkpoints, on_text, on_own))
    return lines


def _share(trace: SplitTrace, checkpoint: int, head: str) -> float:
    return round(float(trace.exits[checkpoint, head].agrees.mean()), 6)


def agreement_rows(lines: Sequence[HeadAgreement]) -> list[list[str]]:
    """Table rows, one per checkpoint: layers run, then each head's agreement, or a dash where the head was not trained.

    Agreement on the model's own continuations follows in brackets, where it was measured.
    """
    checkpoints = sorted({layer for line in lines for layer in line.checkpoints})
    return [[str(layer), *(_cell(line, layer) for line in lines)] for layer in checkpoints]


def _cell(line: HeadAgreement, layer: int) -> str:
    if layer not in line.checkpoints:
        return "–"
    i = line.checkpoints.index(layer)
    own = f" ({line.continuations[i]:.0%})" if line.continuations else ""
    return f"{line.text[i]:.1%}{own}"
