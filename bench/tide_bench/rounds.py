"""Timed rounds: in each, every arm continues the same prompts once, one arm after the other, until the time is up.

Arms live in processes of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from tide_bench.arm_pool import RunningArm
from tide_bench.arms import ArmSpec
from tide_bench.arms.base import Timing
from tide_bench.arms.process import ArmError

Group = list[list[int]]  # prompts of one run, [B][S] token ids
SETTLE_S = 0.2  # thread pools spin for a while after their last work
FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class TimedRun:
    """One group of prompts, continued by one arm.

    Args:
        meeting, round: runs with the same two were neighbours in time and had the same prompts.
        peak_bytes: largest memory of its process during the run.
        gpu_bytes: of GPUs, see `ArmProcess`.
    """

    meeting: int
    round: int
    timing: Timing
    peak_bytes: int
    gpu_bytes: int | None = None


def run_rounds(
    entries: Sequence[RunningArm],
    groups: Sequence[Group],
    new_tokens: int,
    seconds: float,
    meeting: int,
    failed: Callable[[ArmSpec, str], None],
    settled: Callable[[dict[str, list[TimedRun]]], bool],
) -> dict[str, list[TimedRun]]:
    """Run every arm on each of ``groups``, until ``seconds`` are over or the runs so far are ``settled``.

    At least `FEWEST_ROUNDS` rounds are run. Each round has an order of its own: an arm that always followed the same one would
    always meet the caches and clocks that this one leaves. ``failed`` is called with each arm that fails, and the reason.
    """
    runs: dict[str, list[TimedRun]] = {entry.spec.name: [] for entry in entries}
    running = list(entries)
    end = time.monotonic() + seconds
    for number, group in enumerate(groups):
        if number >= FEWEST_ROUNDS and (time.monotonic() > end or settled(runs)):
            break
        for entry in Random(f"{meeting} {number}").sample(running, len(running)):
            try:
                runs[entry.spec.name].append(_timed(entry, group, new_tokens, meeting, number))
            except ArmError as error:
                running.remove(entry)
                failed(entry.spec, str(error))
    return runs


def _timed(entry: RunningArm, group: Group, new_tokens: int, meeting: int, number: int) -> TimedRun:
    time.sleep(SETTLE_S)
    timing = entry.generate(group, new_tokens)
    return TimedRun(meeting, number, timing, entry.process.peak_bytes, entry.process.gpu_bytes)
