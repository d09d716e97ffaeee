"""Turns: every arm continues the same prompts, one arm after the other (A B C A B C …), until the time is up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tide_bench.arm_pool import RunningArm
from tide_bench.arms.base import Timing
from tide_bench.arms.process import ArmError
from tide_bench.arms.registry import ArmSpec
from tide_bench.energy import EnergyMeter

Group = list[list[int]]  # prompts of one turn, [B][S] token ids
SETTLE_S = 0.2  # thread pools spin for a while after their last work
FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class TimedRun:
    """What an arm did with one group of prompts.

    Args:
        meeting, round: turns with the same two were neighbours in time and had the same prompts.
        peak_bytes: most memory of its process meanwhile.
        joules: of the whole machine meanwhile; None where nobody counts them.
    """

    meeting: int
    round: int
    timing: Timing
    peak_bytes: int
    joules: float | None


def run_rounds(
    entries: Sequence[RunningArm],
    groups: Sequence[Group],
    new_tokens: int,
    meter: EnergyMeter,
    seconds: float,
    meeting: int,
    failed: Callable[[ArmSpec, str], None],
    settled: Callable[[dict[str, list[TimedRun]]], bool],
) -> dict[str, list[TimedRun]]:
    """A turn of every arm at each of ``groups``, until ``seconds`` are over or the turns so far are ``settled``, but for
    `FEWEST_ROUNDS`. Each round has an order of its own, so that none always follows the same one, whose work may have left the
    machine slower. ``failed`` hears of arms that stop on the way."""
    turns: dict[str, list[TimedRun]] = {entry.spec.name: [] for entry in entries}
    running, end = list(entries), time.monotonic() + seconds
    for number, group in enumerate(groups):
        if number >= FEWEST_ROUNDS and (time.monotonic() > end or settled(turns)):
            break
        for entry in Random(f"{meeting} {number}").sample(running, len(running)):
            try:
                turns[entry.spec.name].append(_turn(entry, group, new_tokens, meter, meeting, number))
            except ArmError as error:
                running.remove(entry)
                failed(entry.spec, str(error))
    return turns


def _turn(entry: RunningArm, group: Group, new_tokens: int, meter: EnergyMeter, meeting: int, number: int) -> TimedRun:
    time.sleep(SETTLE_S)
    before = meter.joules()
    timing = entry.generate(group, new_tokens)
    after = meter.joules()
    joules = None if before is None or after is None else after - before
    return TimedRun(meeting, number, timing, entry.process.peak_bytes, joules)
