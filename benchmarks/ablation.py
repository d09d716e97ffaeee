"""What each rule of drafting and early exits earns: every rule is switched off in turn, the others left as they are.

    python -m benchmarks.ablation                      # 16 prompts x 48 tokens
    python -m benchmarks.ablation --prompts 24 --new-tokens 128

A rule is a constant of `DepthTuning`; switched off, it has the value that makes it do nothing. Each variant generates beside the
default tuning, on the same engine and prompts, in slices of a few tokens by turns (see `benchmarks.arms.turns`). Two figures tell
what a rule earns, in percent of the time without it:

simulated  the cost model's price of the launches that were made. It has no noise, but knows nothing of Python's time.
measured   wall clock. On a shared machine a difference below about 3% is noise.

A rule that earns less than 1% in every cell, simulated, should go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from tide_bench.arms.tide import load_second
from tide_bench.report import Report
from tide_runtime import GenerationParams
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth.options import DepthOptions
from tide_runtime.depth.registry import make_policy
from tide_runtime.depth_tuning import DepthTuning

from benchmarks.arms.engine_arm import EngineArm, LoggedEngine
from benchmarks.arms.turns import Group, Turn, take_turns
from benchmarks.held_out import held_out_prompts
from benchmarks.models.calibrated_bundles import calibrated_bundles
from benchmarks.tables.modelled_time import modelled_ms

CACHE = Path(__file__).resolve().parents[1] / "build" / "bench-cache"
CELLS = tuple((batch, temperature) for batch in (1, 8) for temperature in (0.0, 0.8))
PROMPT_TOKENS = 64
# Rule → the policies it concerns, and the tuning without it.
RULES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "cooldown": (("exact", "exit"), {"cooldown": 0, "longest_cooldown": 0}),
    "exit_expectation": (("exit",), {"exit_expectation_weight": 1.0}),
    "batch_gate": (("exact", "exit"), {"least_batch_speedup": 0.0}),
    "sampled_gate": (("exact", "exit"), {"least_sampled_speedup": 0.0}),
    "padding_penalty": (("exact",), {"padding_penalty": 0.0}),
    "cap_of_longest_draft": (("exact",), {"draft_lengths": (64,)}),
    "few_drafts_first": (("exact",), {"first_speculative_tokens": 64}),
}

console = Console(width=max(150, Console().width))


def run_cell(
    engine: LoggedEngine, costs: CostModel, policy: str, batch: int, temperature: float, groups: Sequence[Group], new_tokens: int
) -> list[dict[str, Any]]:
    """A row for each rule of ``policy`` in one cell."""

    def arm(**changes: Any) -> EngineArm:
        options = DepthOptions(tuning=replace(DepthTuning(), **changes))
        return EngineArm(engine, make_policy(policy, engine.manifest, options))

    second = engine.second()
    baseline = EngineArm(second, make_policy(policy, engine.manifest, DepthOptions()))
    arms = {name: arm(**changes) for name, (policies, changes) in RULES.items() if policy in policies}
    params = GenerationParams(max_new_tokens=new_tokens, temperature=temperature, ignore_eos=True)
    for one in (baseline, *arms.values()):  # bind every shape first
        one.turn(groups[0], params, batch)
    base, turns = take_turns(baseline, arms, groups, params, batch)
    return [
        {"policy": policy, "batch": batch, "temperature": temperature, "rule": name, **_earned(own, base, engine.layers, costs)}
        for name, own in turns.items()
    ]


def _earned(own: Sequence[Turn], base: Sequence[Turn], layers: dict[str, int], costs: CostModel) -> dict[str, float]:
    """Percent of the time that the rule saves: positive where the variant without it is slower, per token generated."""
    tokens = [sum(turn.decoded for turn in turns) for turns in (own, base)]
    without, with_rule = (
        sum(modelled_ms(t.launches, layers, costs) for t in turns) / n for turns, n in zip((own, base), tokens, strict=True)
    )
    measured = float(np.median([turn.seconds / turn.base_seconds for turn in own]))
    return {"simulated_pct": 100 * (without / with_rule - 1), "measured_pct": 100 * (measured - 1)}


def _print(model: str, rows: Sequence[dict[str, Any]]) -> None:
    table = Table("rule", "policy", *(f"batch {b}, T {t:g}: simulated / measured %" for b, t in CELLS), title=model)
    for policy, rule in dict.fromkeys((row["policy"], row["rule"]) for row in rows):
        found = {(row["batch"], row["temperature"]): row for row in rows if (row["policy"], row["rule"]) == (policy, rule)}
        cells = [f"{found[c]['simulated_pct']:+.1f} / {found[c]['measured_pct']:+.1f}" if c in found else "" for c in CELLS]
        table.add_row(rule, policy, *cells)
    console.print(table)


def main(
    models: Annotated[str, typer.Option(help="Demo models, separated by commas.")] = "layerskip,stock",
    prompts: Annotated[int, typer.Option(min=8, help="Held-out prompts of 64 tokens.")] = 16,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each sequence.")] = 48,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Switch off each rule of drafting and early exits in turn."""
    ids = [prompt.ids for prompt in held_out_prompts(prompts, PROMPT_TOKENS, "library")]
    report = Report("ablation", models=models, prompts=prompts, new_tokens=new_tokens)
    for model in models.split(","):
        engine = LoggedEngine(load_second(calibrated_bundles(model, cache)[1]))
        for policy, (batch, temperature) in product(("exact", "exit"), CELLS):
            groups = [ids[i : i + batch] for i in range(0, len(ids) - batch + 1, batch)]
            with console.status(f"{model}, {policy}, batch {batch}, temperature {temperature:g}"):
                rows = run_cell(engine, CostModel.of(engine.manifest), policy, batch, temperature, groups, new_tokens)
            report.rows += [{"model": model, **row} for row in rows]
        _print(model, [row for row in report.rows if row["model"] == model])
    best = {name: max(row["simulated_pct"] for row in report.rows if row["rule"] == name) for name in RULES}
    for name, earned in best.items():
        report.add(f"best_{name}_pct", earned)
    report.add("rules", len(RULES))
    report.add("rules_that_earn_1pct", sum(earned >= 1 for earned in best.values()))
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
