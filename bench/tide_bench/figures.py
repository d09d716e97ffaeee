"""The figures of every arm at one place (prompt length, batch size), from its timed runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from tide_bench.arms.base import with_limitation
from tide_bench.config import BenchConfig
from tide_bench.output_checks import disagreement_rate, identical_share
from tide_bench.paired_ratio import PairedRatio, chained_ratio, paired_ratio
from tide_bench.rounds import TimedRun

Seconds = Callable[[TimedRun], float]


def decode_seconds(turn: TimedRun) -> float:
    return turn.timing.decode_s


def prefill_seconds(turn: TimedRun) -> float:
    return turn.timing.first_token_s


def speed_row(title: str, turns: Sequence[TimedRun], seconds: Seconds) -> dict[str, Any]:
    """``title`` of the arm with what limits it, times in ms, memory in MiB; uncounted figures are left out."""
    timings = [turn.timing for turn in turns]
    rows = len(timings[0].tokens)
    steps = [t.decode_ms_per_token for t in timings]
    row: dict[str, Any] = {"title": with_limitation(title, timings[0].limitation), "rounds": len(turns)}
    row |= _spread("first_token_ms", [1e3 * t.first_token_s for t in timings])
    if seconds is decode_seconds:
        row |= {**_spread("ms_per_token", steps), "tokens_per_s": 1e3 * rows / float(np.median(steps))}
        if timings[0].layers_per_token is not None:
            row["layers_per_token"] = float(np.mean([t.layers_per_token for t in timings]))
    row["peak_mib"] = max(turn.peak_bytes for turn in turns) / 2**20
    held = [turn.gpu_bytes for turn in turns if turn.gpu_bytes is not None]
    if held:
        row["gpu_mib"] = max(held) / 2**20
    if timings[-1].drive is not None:  # of the last: a capture that fails shows after the first launches
        row["drive"] = timings[-1].drive
    return row


def text_row(turns: Sequence[TimedRun], reference: Sequence[TimedRun]) -> dict[str, float]:
    """``agreement`` with the reference's texts: per token up to the first difference; ``identical``: share of all tokens."""
    texts = {turn.round: turn.timing.tokens for turn in reference}
    own = [row for turn in turns if turn.round in texts for row in turn.timing.tokens]
    references = [row for turn in turns if turn.round in texts for row in texts[turn.round]]
    return {"agreement": 1 - disagreement_rate(own, references), "identical": identical_share(own, references)}


def ratio_row(name: str, turns: Mapping[str, Sequence[TimedRun]], seconds: Seconds, config: BenchConfig) -> dict[str, float]:
    """Speed over each of the config's baselines that ran: ``vs_eager``, ``vs_eager_low``, ``vs_eager_high`` (95%), and so on."""
    row: dict[str, float] = {}
    for baseline in config.baselines:
        if baseline == name or not turns.get(baseline):
            continue
        if (ratio := _ratio(turns[name], turns[baseline], turns.get(config.pivot, ()), seconds)) is not None:
            figures = asdict(ratio)
            row |= {f"vs_{baseline}": figures["median"]}
            row |= {f"vs_{baseline}_{end}": figures[end] for end in ("low", "high", "total")}
    return row


def settled(turns: Mapping[str, Sequence[TimedRun]], seconds: Seconds, config: BenchConfig) -> bool:
    """Whether every arm's speed over the first baseline here is known to within the config's precision (95% interval).

    To stop there leaves the interval as it is in the limit of many runs (Chow & Robbins 1965).
    """
    baseline = next((name for name in config.baselines if turns.get(name)), None)
    if baseline is None:
        return False
    others = (own for name, own in turns.items() if name != baseline and own)
    pivot = turns.get(config.pivot, ())
    ratios = [ratio for own in others if (ratio := _ratio(own, turns[baseline], pivot, seconds)) is not None]
    return bool(ratios) and all(ratio.high - ratio.low <= 2 * config.precision * ratio.median for ratio in ratios)


def _ratio(
    own: Sequence[TimedRun], baseline: Sequence[TimedRun], pivot: Sequence[TimedRun], seconds: Seconds
) -> PairedRatio | None:
    """Speedup from runs on the same prompts next to each other; over the pivot when the two were never in memory together."""
    if direct := _pairs(baseline, own, seconds):
        return paired_ratio([a for a, _ in direct], [b for _, b in direct])
    one, other = (_pairs(pivot, arm, seconds) for arm in (own, baseline))
    return chained_ratio(one, other) if one and other else None


def _pairs(first: Sequence[TimedRun], second: Sequence[TimedRun], seconds: Seconds) -> list[tuple[float, float]]:
    by_time = {(turn.meeting, turn.round): seconds(turn) for turn in first}
    return [(by_time[turn.meeting, turn.round], seconds(turn)) for turn in second if (turn.meeting, turn.round) in by_time]


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    low, middle, high = np.percentile(values, (10, 50, 90))
    return {name: float(middle), f"{name}_p10": float(low), f"{name}_p90": float(high)}
