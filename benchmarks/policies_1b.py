"""The overhead of lazy depth at real sizes: scripted exits on a 1.1B model: measured against theory.

    python -m benchmarks.policies_1b                   # 1.1B random weights, fp32: some minutes
    python -m benchmarks.policies_1b --model demo      # the same on the small model

Random weights have no useful exits, so the exits' results are scripted (see `scripted_exits`): the router accepts 0, 50, 90 or
100% of the tokens, and `exact`'s drafts are right. Theory: the time that the launches made should take by step
costs measured in this run; the baseline's, the bundle's unsplit graph, the same way. What is left is the policies' own work.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from tide_bench.arms.tide import load_second
from tide_bench.report import Report
from tide_bench.stub_exits import with_exits
from tide_calibrate.costs.measure import measure_costs
from tide_runtime import GenerationParams, ThreadOptions
from tide_runtime.bundle.manifest import Manifest
from tide_runtime.costs.cost_model import CostModel
from tide_runtime.depth.exact import ExactDepth
from tide_runtime.depth.exit import ExitDepth
from tide_runtime.depth.full import FullDepth
from tide_runtime.depth.options import DepthOptions

from benchmarks.arms.engine_arm import EngineArm, LoggedEngine
from benchmarks.arms.policy_arms import uncut_beside
from benchmarks.arms.turns import Arm, Group, take_turns
from benchmarks.exits.scripted_exits import ScriptedArm, SkippingPolicy, Texts
from benchmarks.models.model_folders import MODELS, BenchModel
from benchmarks.models.quarter_cut import quarter_cut
from benchmarks.policies_cpu import CACHE
from benchmarks.tables.arm_figures import speed_figures, theory_figures

COST_SEQS = (1, 2, 4, 6, 16, 64)  # tokens at once: single ones, drafts, and what `exit` defers

console = Console(width=max(110, Console().width))


@dataclass(frozen=True)
class Stage:
    """A cut model with an exit after a quarter of its layers, the baseline, and what its steps cost."""

    engine: LoggedEngine
    manifest: Manifest
    baseline: EngineArm
    costs: CostModel


def set_stage(model: BenchModel, cache: Path) -> Stage:
    """Export, measure the costs, load."""
    with console.status(f"{model.name}: export"):
        bundle, place = quarter_cut(model, cache)
    with console.status(f"{model.name}: step costs"):
        table = measure_costs(bundle, seqs={1: COST_SEQS}, threads=ThreadOptions(shared=True))
    with console.status(f"{model.name}: load"):
        engine = LoggedEngine(load_second(bundle))
        baseline = uncut_beside(engine)
    manifest = with_exits(engine.manifest, [place], table, exact_threshold=0.5, exit_threshold=0.5)
    return Stage(engine, manifest, baseline, CostModel.of(manifest))


def scripted_arms(stage: Stage, rates: list[int], texts: Texts) -> dict[str, Arm]:
    """``exact_RATE`` and ``exit_RATE``."""
    arms: dict[str, Arm] = {}
    for rate in rates:
        policies: dict[str, SkippingPolicy] = {
            "exact": ExactDepth(stage.manifest, DepthOptions(draft="router")),
            "exit": ExitDepth(stage.manifest, DepthOptions()),
        }
        for name, policy in policies.items():
            arms[f"{name}_{rate}"] = ScriptedArm(stage.engine, policy, stage.manifest, rate / 100, texts)
    return arms


def measure(stage: Stage, rates: list[int], groups: list[Group], params: GenerationParams) -> list[dict[str, Any]]:
    """A row for each policy and rate."""
    full = FullDepth()
    texts = {tuple(group[0]): stage.engine.turn(full, group, params, 1).tokens[0] for group in groups}
    arms = scripted_arms(stage, rates, texts)
    for arm in (stage.baseline, *arms.values()):  # binds buffers
        arm.turn(groups[0], params, 1)
    base, turns = take_turns(stage.baseline, arms, groups, params, 1)
    layers = stage.engine.layers
    return [
        {"arm": name} | speed_figures(own) | theory_figures(own, layers, base, stage.baseline.engine.layers, stage.costs)
        for name, own in turns.items()
    ]


def _print(model: BenchModel, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"{model.title}, fp32, batch 1, scripted exits")
    for heading in ("policy", "yes", "× unsplit", "theory ×", "measured ÷ theory", "layers/token", "tokens/s"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for row in rows:
        policy, rate = row["arm"].split("_")
        figures = (f"{row[name]:.2f}" for name in ("ratio_total", "theoretical", "measured_over_theoretical"))
        table.add_row(policy, f"{rate}%", *figures, f"{row['layers_per_token']:.1f}", f"{row['tokens_per_s']:.1f}")
    console.print(table)


def add_results(report: Report, rows: list[dict[str, Any]], rates: list[int]) -> None:
    """``scripted_measured_over_theoretical_RATE`` is the lesser of the two policies'."""
    shares = {row["arm"]: row["measured_over_theoretical"] for row in rows}
    for rate in rates:
        report.add(f"scripted_measured_over_theoretical_{rate}", min(shares[f"{name}_{rate}"] for name in ("exact", "exit")))
    for row in rows:
        report.add(f"scripted_{row['arm']}", row["ratio_total"])
        report.add(f"scripted_measured_over_theoretical_{row['arm']}", row["measured_over_theoretical"])


def main(
    model: Annotated[str, typer.Option(help=f"Of {','.join(MODELS)}.")] = "1b",
    rates: Annotated[str, typer.Option(help="Percentages of yes.")] = "0,50,90,100",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, one after the other.")] = 3,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each.")] = 32,
    cache: Annotated[Path, typer.Option(help="Where weights and graphs are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Measure policies with scripted exits."""
    if model not in MODELS:
        raise typer.BadParameter(f"--model is one of {', '.join(MODELS)}")
    chosen, percents = MODELS[model], [int(rate) for rate in rates.split(",")]
    report = Report("policies_1b", model=model, rates=rates, prompts=prompts, new_tokens=new_tokens)
    stage = set_stage(chosen, cache)
    groups: list[Group] = [[prompt] for prompt in chosen.prompts(prompts, chosen.prompt_tokens)]
    report.rows = measure(stage, percents, groups, GenerationParams(max_new_tokens=new_tokens, ignore_eos=True))
    _print(chosen, report.rows)
    add_results(report, report.rows, percents)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
