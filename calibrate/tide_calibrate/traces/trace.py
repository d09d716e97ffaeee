"""What exit heads and routers said about every token of a text: what thresholds, cost model and report are made from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ExitTrace:
    """One exit head after ``checkpoint`` layers, on n tokens in text order.

    Args:
        checkpoint: layers run before the exit.
        head: ``identity``, ``linear``, ``tail:k`` or ``block:k``.
        agrees: [n] bool, the head's likeliest token is the full model's.
        nll: [n] float32, the head's negative log-likelihood (nats) of the text's next token; NaN at a window's end.
        scores: router name (``mlp``, ``max_probability``, ``entropy``, ``cosine``, …) → [n] float32, higher means surer.
    """

    checkpoint: int
    head: str
    agrees: NDArray[np.bool_]
    nll: NDArray[np.float32]
    scores: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def select(self, kept: NDArray) -> ExitTrace:
        """The trace of some tokens only: a mask [n], or their numbers."""
        scores = {name: values[kept] for name, values in self.scores.items()}
        return replace(self, agrees=self.agrees[kept], nll=self.nll[kept], scores=scores)

    def joined(self, other: ExitTrace) -> ExitTrace:
        """This trace's tokens and then those of the ``other``, of the same exit."""
        scores = {name: np.concatenate([values, other.scores[name]]) for name, values in self.scores.items()}
        agrees, nll = np.concatenate([self.agrees, other.agrees]), np.concatenate([self.nll, other.nll])
        return replace(self, agrees=agrees, nll=nll, scores=scores)


@dataclass(frozen=True)
class OwnText:
    """A text that the model wrote: all its tokens [P + n], the first ``prompt`` (P) of them given."""

    tokens: NDArray[np.int64]
    prompt: int


@dataclass(frozen=True)
class SplitTrace:
    """All exits on the same n tokens.

    Args:
        window, document: [n] int32, where each token comes from; tokens of a window are consecutive and in order.
        full_nll: [n] float32, the full model's negative log-likelihood (nats) of the text's next token; NaN at a window's end.
        exits: (checkpoint, head) → its trace.
        num_layers: L.
        texts: window → its whole text, where the model wrote it itself and n tokens of the window are those that it decided.
    """

    window: NDArray[np.int32]
    document: NDArray[np.int32]
    full_nll: NDArray[np.float32]
    exits: dict[tuple[int, str], ExitTrace]
    num_layers: int
    texts: dict[int, OwnText] = field(default_factory=dict)

    def select(self, kept: NDArray) -> SplitTrace:
        """The trace of some tokens only: a mask [n], or their numbers, rising."""
        exits = {key: trace.select(kept) for key, trace in self.exits.items()}
        window, document, full_nll = self.window[kept], self.document[kept], self.full_nll[kept]
        return replace(self, window=window, document=document, full_nll=full_nll, exits=exits)

    def joined(self, other: SplitTrace) -> SplitTrace:
        """This trace's tokens and then the ``other``'s, of other windows; both have the same exits."""
        return replace(
            self,
            window=np.concatenate([self.window, other.window]),
            document=np.concatenate([self.document, other.document]),
            full_nll=np.concatenate([self.full_nll, other.full_nll]),
            exits={key: trace.joined(other.exits[key]) for key, trace in self.exits.items()},
            texts=self.texts | other.texts,
        )
