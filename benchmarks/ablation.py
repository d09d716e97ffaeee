"""What each rule of drafting and early exits earns: every rule is switched off in turn, the others left as they are.

    python -m benchmarks.ablation                      # 16 prompts x 48 tokens
    python -m benchmarks.ablation --prompts 24 --new-tokens 128

A rule is a constant of `DepthTuning`; switched off, it has the value that makes it do nothing. Each variant is an engine on the
same weights, and generates beside the default tuning on the same prompts. Two figures tell what a rule earns, in percent of the
time without it:

simulated  the cost model's price of the launches that were made, prompts included. It has no noise, but knows nothing of
           Python's time.
measured   wall clock of decoding. On a shared machine a difference below about 3% is noise.

A rule that earns less than 1% in every cell, simulated, should go.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from tide_bench.arms.tide import load_second
from tide_bench.report import Report
from tide_runtime import DepthOptions, Engine, GenerationParams
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth_tuning import DepthTuning

from benchmarks.arms.modelled_time import LaunchCounts, layers_of, modelled_ms
from benchmarks.arms.turns import EngineArm, Group, Turn, take_turns
from benchmarks.held_out import held_out_prompts
from benchmarks.models.calibrated_bundles import calibrated_bundles
from benchmarks.models.model_folders import CACHE

CELLS = tuple((batch, temperature) for batch in (1, 8) for temperature in (0.0, 0.8))
PROMPT_TOKENS = 64
REPEATABLE = DepthTuning(observe_passes=False)  # or launches would depend on the clock
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
    weights: Engine, policy: str, batch: int, temperature: float, groups: Sequence[Group], new_tokens: int
) -> list[dict[str, Any]]:
    """A row for each rule of ``policy`` in one cell."""
    params = GenerationParams(max_new_tokens=new_tokens, temperature=temperature, ignore_eos=True)
    place = {"batch": batch, "temperature": temperature}
    rules = {name: changes for name, (policies, changes) in RULES.items() if policy in policies}
    return [
        {**place, "rule": name, **_earned(weights, policy, batch, changes, groups, params)} for name, changes in rules.items()
    ]


def _earned(
    weights: Engine, policy: str, batch: int, changes: dict[str, Any], groups: Sequence[Group], params: GenerationParams
) -> dict[str, Any]:
    """Percent of the time that a rule saves: positive where the variant without it is slower, per token generated. Both variants
    have fresh engines, as an engine learns from its requests."""
    with ExitStack() as stack:
        arms, seen = [], (LaunchCounts(), LaunchCounts())
        for launches, tuning in zip(seen, (REPEATABLE, replace(REPEATABLE, **changes)), strict=True):
            options = replace(weights.options, policy=policy, depth=DepthOptions(tuning=tuning), max_batch=batch)
            arms.append(EngineArm(policy, stack.enter_context(weights.with_options(options, launches))))
            arms[-1].turn(groups[0], params)  # binds every shape first
            launches.counts.clear()
        base, turns = take_turns(arms[0], {"without": arms[1]}, groups, params)
    own = turns["without"]
    with_rule, without = (_simulated_ms(weights, *pair) for pair in zip(seen, (base, own), strict=True))
    return {
        "policy": arms[0].title,
        "simulated_pct": 100 * (without / with_rule - 1),
        "measured_pct": 100 * (median(turn.seconds / turn.base_seconds for turn in own) - 1),
    }


def _simulated_ms(weights: Engine, launches: LaunchCounts, turns: Sequence[Turn]) -> float:
    """Per token that ``turns`` decoded."""
    costs = CostModel.of(weights.manifest)
    return modelled_ms(launches.counts, layers_of(weights.manifest), costs) / sum(turn.decoded for turn in turns)


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
        with load_second(calibrated_bundles(model, cache)[1]) as weights:
            for policy, (batch, temperature) in product(("exact", "exit"), CELLS):
                groups = [ids[i : i + batch] for i in range(0, len(ids) - batch + 1, batch)]
                with console.status(f"{model}, {policy}, batch {batch}, temperature {temperature:g}"):
                    rows = run_cell(weights, policy, batch, temperature, groups, new_tokens)
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
