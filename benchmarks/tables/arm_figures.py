"""The figures of one arm against the baseline, from their turns at the same prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from tide_bench.paired_ratio import paired_ratio
from tide_bench.text_comparison import disagreement_rate, identical_share, ngram_hit_share
from tide_runtime.costs.cost_model import CostModel

from benchmarks.arms.turns import Group, Turn
from benchmarks.tables.modelled_time import modelled_ms

Layers = Mapping[str, int]  # graph name → decoder layers it runs


def speed_figures(turns: Sequence[Turn]) -> dict[str, Any]:
    """Ratio to the baseline beside each turn, tokens/s, and what was launched for it."""
    ratio = paired_ratio([turn.base_seconds for turn in turns], [turn.seconds for turn in turns])
    decoded = sum(turn.decoded for turn in turns)
    figures: dict[str, Any] = {
        **{f"ratio_{name}": value for name, value in asdict(ratio).items()},
        "tokens_per_s": decoded / sum(turn.seconds for turn in turns),
        "groups": len(turns),
    }
    if turns[0].layers_per_token is not None:
        figures["layers_per_token"] = float(np.mean([turn.layers_per_token for turn in turns]))
        figures["depth"] = float(np.mean([turn.depth for turn in turns]))
    drafted: Counter[str] = sum((turn.drafted for turn in turns), Counter())
    accepted: Counter[str] = sum((turn.accepted for turn in turns), Counter())
    return figures | {f"accepted_{drafter}": accepted[drafter] / count for drafter, count in drafted.items()}


def theory_figures(
    turns: Sequence[Turn], layers: Layers, base: Sequence[Turn], base_layers: Layers, costs: CostModel
) -> dict[str, float]:
    """Segment launches per token of the batch, and the speedup that the modelled costs of all launches give.

    ``measured_over_theoretical`` is the median over groups of (measured ratio / modelled ratio) of the same group.
    """
    base = base[: len(turns)]  # an arm may have stopped after the first groups
    modelled = np.array([modelled_ms(turn.launches, layers, costs) for turn in turns])
    base_modelled = np.array([modelled_ms(turn.launches, base_layers, costs) for turn in base])
    measured = np.array([turn.base_seconds / turn.seconds for turn in turns])
    segments = sum(count for turn in turns for launch, count in turn.launches.items() if layers[launch.graph])
    return {
        "launches_per_token": segments / sum(turn.decoded for turn in turns),
        "theoretical": float(base_modelled.sum() / modelled.sum()),
        "measured_over_theoretical": float(np.median(measured * modelled / base_modelled)),
    }


def text_figures(turns: Sequence[Turn], reference: Sequence[Turn]) -> dict[str, float]:
    """How far greedy texts are the reference's: per token up to the first difference, and place by place."""
    rows = [row for turn in turns for row in turn.tokens]
    references = [row for turn in reference[: len(turns)] for row in turn.tokens]
    return {"disagreement": disagreement_rate(rows, references), "differing_tokens": 1 - identical_share(rows, references)}


def repetition(groups: Sequence[Group], turns: Sequence[Turn]) -> float:
    """Mean share of a text that n-grams of it and its prompt foretell."""
    pairs = [pair for group, turn in zip(groups, turns, strict=False) for pair in zip(group, turn.tokens, strict=True)]
    return float(np.mean([ngram_hit_share(prompt, output) for prompt, output in pairs]))
