"""Synthetic runs and table rows, whose right figures are known."""

from typing import Any

from tide_bench.arms import ArmSpec
from tide_bench.arms.base import Timing
from tide_bench.arms.process import ArmError
from tide_bench.rounds import TimedRun


def turn(seconds: float, number: int = 0, meeting: int = 0, tokens: list[list[int]] | None = None) -> TimedRun:
    """``seconds`` of decoding two tokens behind the first."""
    return TimedRun(meeting, number, Timing(tokens or [[1, 2, 3]], 0.01, seconds), 2**20)


def row(arm: str, ratio: float, **more: Any) -> dict[str, Any]:
    """A row of the decode table, as a comparison writes it."""
    place = {"arm": arm, "title": f"<{arm}>", "prompt_tokens": 8, "batch": 1, "other_load": 0.0, "rounds": 3}
    spread = {f"{name}{end}": 2.0 for name in ("ms_per_token", "first_token_ms") for end in ("", "_p10", "_p90")}
    ratios = {f"vs_{b}{end}": ratio for b in ("unsplit", "eager") for end in ("", "_low", "_high", "_total")}
    return {**place, **spread, **ratios, "tokens_per_s": 500.0, "peak_mib": 10.0, "agreement": 1.0, "mark": "", **more}


class FakeProcess:
    """Answers `generate` with the same tokens; fails from call ``fails_at`` on."""

    def __init__(self, calls: list[str], name: str, fails_at: int | None = None) -> None:
        self.gpu_bytes: int | None = None
        self.peak_bytes, self._calls, self._name, self._fails_at, self._count = 1, calls, name, fails_at, 0

    def generate(self, prompts: list[list[int]], new_tokens: int, **options: Any) -> Timing:
        self._count += 1
        if self._fails_at is not None and self._count >= self._fails_at:
            raise ArmError("out of memory")
        self._calls.append(self._name)
        return Timing([[1] * new_tokens for _ in prompts], 0.001, 0.001)


def spec(name: str) -> ArmSpec:
    return ArmSpec(name, name, name, "same")
