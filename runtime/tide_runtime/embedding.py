"""Embeds a text: its tokens run in prompt passes like others, and the states that come out are pooled."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tide_runtime.bundle.embedding_info import EmbeddingInfo
from tide_runtime.errors import EngineClosedError, NumericsError, ParamsError
from tide_runtime.sequence import TokenSequence, is_finite


@dataclass
class EmbeddedSequence(TokenSequence):
    """A text whose states are pooled. It ends with the token that its last pass would choose.

    Args:
        size: numbers of the vector.
        total: [H] sum of the pooled states, in float64.
        pooled: how many these are.
        pooled_until: tokens of the text up to the last of them: a preempted text runs again from its start.
    """

    info: EmbeddingInfo = field(kw_only=True)
    size: int = field(kw_only=True)
    total: NDArray[np.float64] | float = 0.0
    pooled: int = 0
    pooled_until: int = 0

    @classmethod
    def of(cls, text: TokenSequence, info: EmbeddingInfo, size: int) -> EmbeddedSequence:
        given = {f.name: getattr(text, f.name) for f in fields(TokenSequence)}
        return cls(**given, info=info, size=size)

    @property
    def logits_from(self) -> int:
        return 0 if self.info.pooling == "mean" else self.prompt_tokens - 1

    def pick(self, logits: NDArray[np.floating], argmax: int, seen: int | None = None) -> int:
        """Pool ``logits`` [H], the state of the text's token number ``seen``."""
        if not is_finite(logits, argmax):
            raise NumericsError("the model gives states that are not finite for this text; export it in fp32")
        if seen is not None and seen > self.pooled_until:
            self.total = self.total + np.asarray(logits, np.float64)
            self.pooled = self.pooled + 1
            self.pooled_until = seen
        return self.last_token

    def embedding(self) -> NDArray[np.float32]:
        """The vector [size] of a finished text. Raises EngineClosedError where it ended before the text did."""
        if self.finish_reason != "length":
            raise EngineClosedError("the text was not embedded, as the request was cancelled; send it again")
        vector: NDArray[Any] = np.asarray(self.total / self.pooled)[: self.size]
        if self.info.normalized:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
        return vector.astype(np.float32)


def embedding_size(info: EmbeddingInfo, hidden_size: int, wanted: int | None) -> int:
    """Numbers of a vector where ``wanted`` are asked for; None: all. Raises ParamsError where the model has none of that size."""
    if wanted is None or wanted == hidden_size:
        return hidden_size
    if info.dimensions is None:
        raise ParamsError(
            f"dimensions is {wanted}, and this model was trained for vectors of {hidden_size} numbers only; leave it out. Where "
            'it can be cut short (Matryoshka), add "is_matryoshka": true to its config.json and export it again',
            "dimensions",
        )
    if not 0 < wanted < hidden_size or (info.dimensions and wanted not in info.dimensions):
        allowed = ", ".join(map(str, info.dimensions)) or f"a number from 1 to {hidden_size}"
        raise ParamsError(f"dimensions is {wanted}, expected {allowed}", "dimensions")
    return wanted
