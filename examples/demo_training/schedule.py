"""Warmup-stable-decay learning rate (Hu et al. 2024, MiniCPM): the decay can start when the time is up, and a later
session can continue from the checkpoint before it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Lengths in steps: linear warm-up, constant, linear decay to zero."""

    total: int
    warmup: int
    decay: int

    def __post_init__(self) -> None:
        if self.total < 0 or self.warmup < 0 or self.decay < 0:
            raise ValueError("schedule: total, warmup and decay must not be negative")

    @property
    def planned_decay_start(self) -> int:
        return max(self.total - self.decay, 0)

    def factor(self, step: int, decay_start: int | None) -> float:
        """Share of the peak rate at `step` (from 0); `decay_start` is where the decay began, if it has."""
        rate = min(1.0, (step + 1) / (self.warmup + 1))
        if decay_start is not None:
            rate *= max(0.0, 1 - (step - decay_start) / max(self.decay, 1))
        return rate

    def finished(self, step: int, decay_start: int | None) -> bool:
        """Whether all steps are done: at the end of the decay, wherever it began."""
        return step >= self.total if decay_start is None else step >= decay_start + self.decay
