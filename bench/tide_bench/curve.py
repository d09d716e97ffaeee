"""The inference cost–performance curve: what policy `exit` costs and how well it does, swept over its threshold.

Texts are given (`read_text`): every threshold is evaluated on the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tide_bench.arms.process import ArmProcess
from tide_bench.arms.tide import Reading
from tide_bench.counters import EnergyMeter

THRESHOLDS = (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.2, 0.0)
FULL, CERTIFIED = "full", "certified"


@dataclass
class CurvePoint:
    """One setting of the policy. Costs are per 1,000 tokens.

    Args:
        name: ``full``, ``certified`` (the bundle's own thresholds), or ``threshold 0.9``.
        layer_passes: decoder layers launched.
        joules: None without counters.
        agreement: share of tokens whose likeliest next token is `full`'s, after the same text.
        perplexity: of the text.
    """

    name: str
    layer_passes: float
    ms: float
    joules: float | None
    agreement: float
    perplexity: float


@dataclass
class _Sums:
    readings: list[Reading] = field(default_factory=list)
    joules: list[float | None] = field(default_factory=list)


def measure_curve(
    process: ArmProcess, texts: Sequence[Sequence[int]], prompt_tokens: int, meter: EnergyMeter
) -> list[CurvePoint]:
    """`full`, the certified thresholds and the sweep, in turn at every text. Raises ArmError when the bundle has no exits."""
    ways: dict[str, dict[str, Any]] = {FULL: {"policy": "full"}}
    ways |= {f"threshold {t:g}": {"policy": "exit", "threshold": t} for t in THRESHOLDS}
    ways |= {CERTIFIED: {"policy": "exit"}}
    sums = {name: _Sums() for name in ways}
    for number, text in enumerate([texts[0], *texts]):
        for name, options in ways.items():
            before = meter.joules()
            reading = process.call("read", list(text), prompt_tokens, **options)
            after = meter.joules()
            if number:  # the first text warms up
                sums[name].readings.append(reading)
                sums[name].joules.append(None if before is None or after is None else after - before)
    return [_point(name, own, sums[FULL]) for name, own in sums.items()]


def _point(name: str, own: _Sums, full: _Sums) -> CurvePoint:
    ours, models = ([answer for reading in sums.readings for answer in reading.answers] for sums in (own, full))
    thousand = 1000 / len(ours)
    counted = [joules for joules in own.joules if joules is not None]
    return CurvePoint(
        name,
        thousand * sum(reading.layers for reading in own.readings),
        1e3 * thousand * sum(reading.decode_s for reading in own.readings),
        thousand * sum(counted) if len(counted) == len(own.joules) else None,
        float(np.mean(np.equal(ours, models))),
        float(np.exp(np.mean([nats for reading in own.readings for nats in reading.nats]))),
    )
