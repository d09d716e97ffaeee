"""The interface of an arm, a way to run a model, whatever library is behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class ArmDevice:
    """What an arm runs on.

    Args:
        name: ``cpu``, ``cuda`` or ``cuda:1``, as torch and `EngineOptions` take it.
        dtype: of the weights of arms that load the HuggingFace model: ``fp32``, ``fp16`` or ``bf16``.
        target: of the bundle, for TIDE's arms; ``auto``: the engine chooses.
    """

    name: str = "cpu"
    dtype: str = "fp32"
    target: str = "auto"

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"


@dataclass(frozen=True)
class Timing:
    """One greedy generation for all sequences of a batch together.

    Args:
        tokens: the new tokens, [B][N], end-of-sequence ids ignored.
        first_token_s: seconds from the call until every sequence had its first token.
        decode_s: seconds from then until the last token.
        layers_per_token: decoder layers launched per token of a sequence after the first; None where it is not counted.
        depth: mean layers run for a token; None where it is not counted.
        limitation: what ran in place of what was asked for, or how it was limited; None: neither.
        drive: of TIDE's arms on a GPU: what drove decoding there.
    """

    tokens: list[list[int]]
    first_token_s: float
    decode_s: float
    layers_per_token: float | None = None
    depth: float | None = None
    limitation: str | None = None
    drive: str | None = None

    @property
    def decode_ms_per_token(self) -> float:
        """Milliseconds of one decode step: one more token for every sequence."""
        return 1e3 * self.decode_s / (len(self.tokens[0]) - 1)

    @property
    def decoded(self) -> int:
        """Tokens of all sequences that ``decode_s`` went into."""
        return sum(len(row) - 1 for row in self.tokens)


def with_limitation(title: str, limitation: str | None) -> str:
    """The name of a row: a figure of something else than what the name says would be believed."""
    return title if limitation is None else f"{title} ({limitation})"


class Arm(Protocol):
    """A loaded model."""

    def generate(self, prompts: list[list[int]], new_tokens: int, **options: Any) -> Timing:
        """Continue ``prompts`` [B][S] (all of one length) greedily by ``new_tokens`` tokens; ``options`` are the arm's own."""
