"""``exit``: a token's output is final at the first checkpoint whose router clears its certified threshold.

The layers it skipped are deferred: its hidden state waits at the checkpoint, and when a later token needs those layers
they are run for all that waits, so a deep token always attends to exact keys and values (River-LLM's deferred KV; CALM,
Schuster et al. 2022, for the thresholds).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tide_runtime.backends.base import Slots
from tide_runtime.errors import ParamsError
from tide_runtime.executor import Executor, Exit, Guess
from tide_runtime.manifest import Manifest
from tide_runtime.policies.options import DepthOptions
from tide_runtime.prefill import prefill_full
from tide_runtime.row import Row

_ROOM = 64  # most tokens that wait at one checkpoint; then the layers they skipped are run


@dataclass(frozen=True)
class _Stop:
    """An exit that may be taken, and from which score on."""

    exit: Exit
    threshold: float


class ExitDepth:
    """Stops where a router is sure; what it skips is run when somebody needs it."""

    name = "exit"

    def __init__(self, manifest: Manifest, prefill_chunk: int, options: DepthOptions) -> None:
        self.executor, self.options, self.prefill_chunk = Executor(manifest), options, prefill_chunk
        self.num_layers = manifest.model.num_layers
        self.stops = [_Stop(e, t) for e in self.executor.exits if (t := self._threshold(e)) is not None]
        if not self.stops:
            raise ParamsError(_no_exit(manifest, options))

    def prefill(self, slots: Slots, row: Row) -> int:
        token = prefill_full(slots, row, self.executor.segments, ["head"], self.prefill_chunk)
        row.frontier = self.executor.frontier(slots, row, room=_ROOM)
        return token

    def decode(self, slots: Slots, rows: Sequence[Row]) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in rows]
        self._make_room(slots, rows)
        deep = [i for i, row in enumerate(rows) if row.frontier.done[0] == row.end]  # held since an earlier step
        undecided, first = [i for i in range(len(rows)) if i not in deep], 0
        for stop in self.stops:
            if not undecided:
                break
            self.executor.advance(slots, rows, undecided, first, stop.exit.boundary)
            guesses = self.executor.ask(slots, rows, undecided, stop.exit)
            for i, guess in zip(undecided, guesses, strict=True):
                if self._may_stop(rows[i], stop, guess):
                    tokens[i].append(self._take(rows[i], stop, guess))
            undecided, first = [i for i in undecided if not tokens[i]], stop.exit.boundary
        self._go_deep(slots, rows, sorted(deep + undecided), first if not deep else 0, tokens)
        for row in rows:
            row.length = row.frontier.done[0]
        return tokens

    def _go_deep(self, slots: Slots, rows: Sequence[Row], needy: list[int], first: int, tokens: list[list[int]]) -> None:
        """Run the rest for the rows that need it: when that is most rows, or one has waited long enough."""
        if not needy:
            return
        if 2 * len(needy) < len(rows) and all(rows[i].held < self.options.max_wait_steps for i in needy):
            for i in needy:
                rows[i].held += 1
            return
        self.executor.advance(slots, rows, needy, first, self.executor.depth)
        for i, last in zip(needy, self.executor.head(slots, rows, needy, [1] * len(needy)), strict=True):
            row = rows[i]
            tokens[i].append(row.choose(last.logits[0], last.tokens[0]))
            row.depth.token_depths.append(self.num_layers)
            row.depth.deep_passes += 1
            row.held = row.streak = 0

    def _may_stop(self, row: Row, stop: _Stop, guess: Guess) -> bool:
        if guess.logits is None or stop.exit.info.checkpoint < self.options.min_depth:
            return False
        if self.options.max_exit_streak and row.streak >= self.options.max_exit_streak:
            return False
        return guess.score >= stop.threshold  # a NaN clears nothing

    def _take(self, row: Row, stop: _Stop, guess: Guess) -> int:
        assert guess.logits is not None
        row.depth.token_depths.append(stop.exit.info.checkpoint)
        row.streak += 1
        return row.choose(guess.logits, guess.token)

    def _make_room(self, slots: Slots, rows: Sequence[Row]) -> None:
        """Run the skipped layers of rows in which no further token could wait."""
        full = [i for i, row in enumerate(rows) if row.frontier.done[0] - row.frontier.done[-1] >= _ROOM - 1]
        if full:
            self.executor.advance(slots, rows, full, 1, self.executor.depth)

    def _threshold(self, exit: Exit) -> float | None:
        return self.options.threshold if self.options.threshold is not None else exit.info.exit_threshold


def _no_exit(manifest: Manifest, options: DepthOptions) -> str:
    if manifest.calibration is None:
        return (
            "policy exit needs a calibration, which this bundle has not; make one with "
            "tide-calibrate MODEL --data DATA --out calib/ and export again with --calibration calib/"
        )
    if not manifest.calibration.exits:
        return "policy exit cannot stop anywhere: the calibration found no layer that agrees early enough; use policy full"
    return (
        "policy exit has no certified threshold in this bundle; calibrate with a larger --max-disagreement or more data, "
        "or set a threshold yourself (threshold=…), which no certificate covers"
    )
