"""What a pass through all layers takes on this machine, by number of sequences and tokens, measured in a second and kept.

The table decides how many drafts are verified and how many prompt tokens share a step with decodes. A few more tokens are almost
free with fp32 weights and are not with int4 weights, and processors differ, so that a table from elsewhere would mislead. Texts
do not depend on it. A load waits for it, so the table is coarse: policies correct it while they serve (`PassClock`).
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

import numpy as np

from tide_runtime.backends.base import ExecutionContext, LoopContext
from tide_runtime.backends.draft_step import Pairs, run_draft_head
from tide_runtime.bundle.calibration import CostTable, StepCost
from tide_runtime.bundle.manifest import LOOP
from tide_runtime.machine_cache import kept_result

# Tokens of each sequence, what decides most first. Matrix products become slower by steps: see `rounded_tokens`.
SHAPES: tuple[tuple[int, ...], ...] = (
    *((tokens,) for tokens in (1, 4, 13, 64)),
    *((tokens,) * 8 for tokens in (1, 4)),
    *((tokens,) for tokens in (2, 12, 7)),
)
# Where steps are padded to such shapes (`PADDED_TOKENS`), whose passes are captured when they run for the second time.
PADDED_SHAPES: tuple[tuple[int, ...], ...] = (
    *((tokens,) for tokens in (1, 2, 4, 8, 16, 64)),
    *((tokens,) * sequences for sequences in (2, 4, 8) for tokens in (1, 4, 16)),
)
# Tokens of each of a looped model's sequences that are on their way; those of one sequence are at as many loops as there are.
LOOP_SHAPES = tuple((sequences, tokens) for sequences in (1, 8) for tokens in (1, 2, 4, 8, 16) if sequences * tokens <= 64)
_MAX_LOGITS = 64  # tokens of the largest step whose logits are all computed, as those of drafts are
_CACHED_TOKENS = 96  # tokens in the cache before the measured ones, where it has room: a short chat
_ROUNDS, _BUDGET_S = 3, 0.6  # measurements of each shape, and seconds after which nothing more is measured
_MIN_SHAPES = 3  # shapes that are measured even where none has run before
_MAX_QUEUED = 0.1  # seconds waiting for a core per measured one; 0.03 on 2 idle cores, 1.6 next to four busy processes
_GUESSES = 7  # timed launches of the draft head; a low quantile of them counts
_QUANTILE = 0.25

Takes = Callable[[int, int], bool]  # whether steps of so many sequences, and so many tokens of each, can be run


def kept_pass_costs(
    key: Sequence[str],
    make_context: Callable[[int], ExecutionContext],
    max_seq_len: int,
    target: str,
    takes: Takes = lambda rows, tokens: True,
    captured: bool = False,
) -> CostTable:
    """`measure_pass_costs`, called only if this machine's cache has no table for ``key`` (see `kept_result`).

    A table that was measured while other processes took the cores serves this process only, and the next load measures again.
    """
    machine = platform.node()

    def measure() -> CostTable:
        return measure_pass_costs(make_context, max_seq_len, target, machine, takes=takes, captured=captured)

    how = (machine, str(os.cpu_count()), str(PADDED_SHAPES if captured else SHAPES), "fastest")
    return kept_result("pass-costs", [*key, *how], measure, asdict, _table, max_queued=_MAX_QUEUED)


def measure_pass_costs(
    make_context: Callable[[int], ExecutionContext],
    max_seq_len: int,
    target: str,
    machine: str,
    clock: Callable[[], float] = time.perf_counter,
    takes: Takes = lambda rows, tokens: True,
    captured: bool = False,
) -> CostTable:
    """Time passes at those `SHAPES`, or `PADDED_SHAPES` where passes are ``captured``, that the target ``takes``. In the table a
    whole pass counts as one layer.

    Every shape runs in every round, so that a disturbance of the machine meets all of them alike, and after a pass of one token
    a sequence, as in decoding: after a larger one a pass of one int4 token took 8% longer.
    """
    cached = min(_CACHED_TOKENS, max_seq_len // 2)
    shapes = PADDED_SHAPES if captured else SHAPES
    shapes = tuple(counts for counts in shapes if cached + max(counts) <= max_seq_len and takes(len(counts), max(counts)))
    with closing(make_context(max(len(counts) for counts in shapes))) as context:

        def run(counts: tuple[int, ...]) -> float:
            _run(context, (1,) * len(counts), cached)
            start = clock()
            _run(context, counts, cached)
            return clock() - start

        for counts in shapes if captured else ():
            for _ in range(2):
                run(counts)
        ms = _fastest_ms(shapes, run, clock, len(shapes) if captured else _MIN_SHAPES)
        drafts = _draft_head_ms(context, cached, clock) if context.has_draft_head else {}
    if not all(counts in ms for counts in shapes if len(counts) > 1):  # one size of a batch says nothing about others
        ms = {counts: time for counts, time in ms.items() if len(counts) == 1}
    return pass_table(ms, target, machine, drafts)


def kept_loop_costs(key: Sequence[str], make_context: Callable[[int], LoopContext], max_seq_len: int, target: str) -> CostTable:
    """`measure_loop_costs`, kept as `kept_pass_costs` keeps its table."""
    machine = platform.node()

    def measure() -> CostTable:
        return measure_loop_costs(make_context, max_seq_len, target, machine)

    how = (machine, str(os.cpu_count()), str(LOOP_SHAPES), "fastest")
    return kept_result("loop-costs", [*key, *how], measure, asdict, _table, max_queued=_MAX_QUEUED)


def _table(kept: dict[str, Any]) -> CostTable:
    return CostTable(**{**kept, "steps": [StepCost(**step) for step in kept["steps"]]})


def measure_loop_costs(
    make_context: Callable[[int], LoopContext],
    max_seq_len: int,
    target: str,
    machine: str,
    clock: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Time launches of `LOOP` at `LOOP_SHAPES`, with logits of every token. In the table a launch counts as one layer."""
    context = make_context(8)
    loops = context.loops
    cached = min(_CACHED_TOKENS, max_seq_len // 2)
    shapes = [(tokens,) * sequences for sequences, tokens in LOOP_SHAPES if cached + tokens <= max_seq_len]

    def run(of_each: tuple[int, ...]) -> float:
        counts = [count for tokens in of_each for count in _by_loop(tokens, loops)]
        start = clock()
        step = context.loop_step(0, counts, counts)
        step.input_ids[: sum(counts)] = 0
        step.place([cached] * len(counts))
        step.run(LOOP)
        return clock() - start

    ms = _fastest_ms(shapes, run, clock)
    context.close()
    return pass_table(ms, target, machine)


def _fastest_ms(
    shapes: Sequence[tuple[int, ...]],
    run: Callable[[tuple[int, ...]], float],
    clock: Callable[[], float],
    least: int = _MIN_SHAPES,
) -> dict[tuple[int, ...], float]:
    """The fewest ms of each shape's runs, which ``run`` gives in seconds: other load only adds time, and the first run of a shape
    allocates memory, which a slow model, whose shapes run once, does not notice. ``least``: shapes that are measured in any
    case."""
    times: dict[tuple[int, ...], float] = {}
    began = clock()
    for finished in range(_ROUNDS * len(shapes)):
        if finished >= least and clock() - began > _BUDGET_S:
            break
        counts = shapes[finished % len(shapes)]
        times[counts] = min(times.get(counts, math.inf), run(counts) * 1e3)
    return times


def _by_loop(tokens: int, loops: int) -> list[int]:
    """``tokens`` spread over ``loops``."""
    return [tokens // loops + (loop < tokens % loops) for loop in range(loops)]


def _run(context: ExecutionContext, counts: Sequence[int], cached: int) -> None:
    num_logits = counts if sum(counts) < _MAX_LOGITS else (1,) * len(counts)
    step = context.step(0, list(counts), list(num_logits))
    step.input_ids[: sum(counts)] = 0
    step.place([cached] * len(counts))
    step.run_all(context.every_layer)
    step.token[:1].tolist()  # a device has then done what it was told


def _draft_head_ms(context: ExecutionContext, cached: int, clock: Callable[[], float]) -> dict[int, tuple[float, float]]:
    """Number of pairs, each after ``cached`` of a sequence → ms of the draft head's first guess after a pass, which leaves the
    caches to other weights, and of a further guess."""
    sizes = [size for size in (1, 8) if size <= context.capacity]
    times: dict[int, list[tuple[float, float]]] = {size: [] for size in sizes}
    states = np.zeros((1, context.step(0, [1]).before.shape[1]), np.float32)
    for _ in range(_GUESSES + 1):
        for size, ms in times.items():
            _run(context, (1,), 1)
            moments = [clock()]
            for _ in range(2):
                run_draft_head(context, [Pairs(row, cached, [0], states) for row in range(size)])
                moments.append(clock())
            ms.append(((moments[1] - moments[0]) * 1e3, (moments[2] - moments[1]) * 1e3))
    low = {size: np.quantile(ms[1:], _QUANTILE, axis=0) for size, ms in times.items()}
    return {size: (float(first), float(further)) for size, (first, further) in low.items()}


def pass_table(
    ms: dict[tuple[int, ...], float],
    target: str,
    machine: str,
    draft_head_ms: Mapping[int, tuple[float, float]] | None = None,
) -> CostTable:
    """The table of passes that took ``ms``. A step of more tokens never takes less in it, whatever was measured.

    Args:
        ms: tokens of each sequence, as many in all → ms of the pass.
        draft_head_ms: tokens → ms of the draft head's first guess and of a further one: ``exit_ms`` and ``head_ms`` in the table.
    """
    sizes = sorted(draft_head_ms or {})

    def guess(tokens: int, place: int) -> float:
        return float(np.interp(tokens, sizes, [draft_head_ms[size][place] for size in sizes])) if draft_head_ms else 0.0

    steps: list[StepCost] = []
    for rows in sorted({len(counts) for counts in ms}):
        least = 0.0
        for counts in sorted(counts for counts in ms if len(counts) == rows):
            least = max(least, ms[counts])
            first, further = (guess(sum(counts), place) for place in range(2))
            steps.append(StepCost(rows, counts[0], 0.0, least, further, first, 0.0))
    return CostTable(target, machine, ms[(1,)], steps)
