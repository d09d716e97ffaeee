"""The figures of one arm against the baseline, from their turns at the same prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from tide_bench.paired_ratio import paired_ratio
from tide_bench.text_comparison import disagreement_rate, identical_share

from benchmarks.arms.turns import Turn


def speed_figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """Ratio to the baseline beside each turn, tokens/s, and what was launched for it."""
    ratio = paired_ratio([turn.base_seconds for turn in turns], [turn.seconds for turn in turns])
    drafted: Counter[str] = sum((turn.drafted for turn in turns), Counter())
    accepted: Counter[str] = sum((turn.accepted for turn in turns), Counter())
    return {
        **{f"ratio_{name}": value for name, value in asdict(ratio).items()},
        "tokens_per_s": sum(turn.decoded for turn in turns) / sum(turn.seconds for turn in turns),
        "groups": len(turns),
        "layers_per_token": fmean(turn.layers_per_token for turn in turns),
        "depth": fmean(turn.depth for turn in turns),
        **{f"accepted_{drafter}": accepted[drafter] / count for drafter, count in drafted.items()},
    }


def text_figures(turns: Sequence[Turn], reference: Sequence[Turn]) -> dict[str, float]:
    """How far greedy texts are the reference's: per token up to the first difference, and place by place."""
    rows = [row for turn in turns for row in turn.tokens]
    references = [row for turn in reference for row in turn.tokens]
    return {"disagreement": disagreement_rate(rows, references), "differing_tokens": 1 - identical_share(rows, references)}
