"""What the manifest of an embedding model says: how the states of a text's tokens become one vector."""

from __future__ import annotations

from dataclasses import dataclass

from tide_runtime.errors import ParamsError

POOLINGS = ("last", "mean")


@dataclass(frozen=True)
class EmbeddingInfo:
    """How texts are embedded. The graphs of such a bundle output final states, behind the final norm, in the place of logits.

    Args:
        pooling: ``last``, the state of the last token, or ``mean``, that of all tokens.
        normalized: vectors have length 1.
        prompt: stands before each text.
        dimensions: of shorter vectors, the beginnings of whole ones, that the model was trained for (Matryoshka); empty: any;
            None: it was trained for whole ones only.

    Raises ParamsError for another pooling.
    """

    pooling: str
    normalized: bool
    prompt: str = ""
    dimensions: list[int] | None = None

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ParamsError(f"pooling is {self.pooling!r}, expected one of {', '.join(POOLINGS)}")
