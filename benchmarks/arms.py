"""The ways to run a model that a benchmark compares. Each is one file; adding one is one line here.

Importing this imports none of their libraries: each arm lives in a process of its own (see arm_process).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Timing:
    """One greedy generation for all rows together.

    Args:
        tokens: the new tokens, [B][N], end-of-sequence ids ignored.
        first_token_s: seconds from the call until every row had its first token.
        decode_s: seconds from then until the last token.
    """

    tokens: list[list[int]]
    first_token_s: float
    decode_s: float

    @property
    def decode_ms_per_token(self) -> float:
        """Milliseconds of one decode step: one more token for every row."""
        return 1e3 * self.decode_s / (len(self.tokens[0]) - 1)


class Arm(Protocol):
    """A loaded model."""

    def generate(self, prompts: list[list[int]], new_tokens: int) -> Timing:
        """Continue ``prompts`` [B][S] (all of one length) greedily by ``new_tokens`` tokens."""


@dataclass(frozen=True)
class ArmKind:
    """``prepare(weights, identity, folder)`` fills ``folder`` if need be and returns what ``load`` takes."""

    title: str
    prepare: Callable[[Path, str, Path], Path]
    load: Callable[[Path], Arm]


def _as_is(weights: Path, identity: str, folder: Path) -> Path:
    return weights


def _prepare_tide(weights: Path, identity: str, folder: Path) -> Path:
    from benchmarks.tide_arm import export_bundle

    return export_bundle(weights, identity, folder)


def _load_tide(folder: Path) -> Arm:
    from benchmarks.tide_arm import TideArm

    return TideArm(folder)


def _prepare_unsplit(weights: Path, identity: str, folder: Path) -> Path:
    from benchmarks.unsplit_arm import build_unsplit

    return build_unsplit(weights, identity, folder)


def _load_eager(folder: Path) -> Arm:
    from benchmarks.eager_arm import EagerArm

    return EagerArm(folder)


def _load_compile(folder: Path) -> Arm:
    from benchmarks.compile_arm import CompileArm

    return CompileArm(folder)


def _prepare_genai(weights: Path, identity: str, folder: Path) -> Path:
    from benchmarks.genai_arm import build_model_folder

    return build_model_folder(weights, identity, folder)


def _load_genai(folder: Path) -> Arm:
    from benchmarks.genai_arm import GenaiArm

    return GenaiArm(folder)


OURS, REFERENCE = "tide", "eager"
ARMS = {
    OURS: ArmKind("TIDE full, 4 segments", _prepare_tide, _load_tide),
    REFERENCE: ArmKind("HF eager", _as_is, _load_eager),
    "unsplit": ArmKind("unsplit ONNX graph", _prepare_unsplit, _load_tide),
    "compile": ArmKind("HF torch.compile", _as_is, _load_compile),
    "genai": ArmKind("onnxruntime-genai", _prepare_genai, _load_genai),
}
