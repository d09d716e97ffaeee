"""Depth policies on one model as options of an engine, and the figures of their turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tide_bench.arms.tide import load_second
from tide_bench.paired_ratio import paired_ratio
from tide_runtime import DepthOptions, Engine

from benchmarks.arms.turns import EngineArm, Turn

BASELINE = "full"


@dataclass(frozen=True)
class PolicyArm:
    """A policy with its options. ``percent``: the certified disagreement of the bundle it runs on."""

    title: str
    policy: str
    depth: DepthOptions = field(default_factory=DepthOptions)
    percent: int = 1


POLICIES = {
    BASELINE: PolicyArm("TIDE full", "full"),
    "exact_router": PolicyArm("TIDE exact, router drafts", "exact", DepthOptions(draft="router")),
    "exact_both": PolicyArm("TIDE exact, both", "exact"),
    "exit5": PolicyArm("TIDE exit at 5%", "exit", percent=5),
}


@contextmanager
def policy_arms(bundles: Mapping[int, Path], names: Sequence[str], batch: int) -> Iterator[dict[str, EngineArm]]:
    """`POLICIES` of ``names`` for ``batch`` sequences at once, on ``bundles`` by certified percentage; closed at the end.

    Arms on the same bundle share its weights: where in memory a graph lies makes it a percent or two faster or slower for as
    long as it is loaded.
    """
    with ExitStack() as stack:
        loaded: dict[int, Engine] = {}
        arms = {}
        for name in names:
            arm = POLICIES[name]
            if arm.percent not in loaded:
                loaded[arm.percent] = stack.enter_context(load_second(bundles[arm.percent]))
            weights = loaded[arm.percent]
            options = replace(weights.options, policy=arm.policy, depth=arm.depth, max_batch=batch)
            arms[name] = EngineArm(arm.title, stack.enter_context(weights.with_options(options)))
        yield arms


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
