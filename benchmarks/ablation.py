"""What each rule of drafting and early exits earns: every rule is switched off in turn, the others left as they are.

    python -m benchmarks.ablation                      # demo models, 16 prompts x 48 tokens, and two tasks of each kind
    python -m benchmarks.ablation --prompts 24 --new-tokens 128
    python -m benchmarks.ablation --quick              # layerskip and the tasks: 10 minutes

A rule is a constant of `DepthTuning`; switched off, it has the value that makes it do nothing. Each variant is an engine on the
same weights, and generates in turn with the default tuning on the same prompts. Figures tell what a rule earns, in percent of
the time without it:

simulated  on the demo models: the cost model's price of the launches that were made, prompts included. It has no noise, but knows
           nothing of Python's time.
measured   wall clock of decoding. On a shared machine a difference below about 3% in one cell is noise.

The tasks are those of `benchmarks.tasks`, on SmolLM2-135M-Instruct in int4, one after the other. Each round of them has a cache
salt of its own, so that earlier tasks of the round draft for later ones, as they would in a service. ``worst_vs_full`` is the
slowest task of at least 16 tokens, against policy `full` in the same round.

A rule that earns less than 1% in every cell should go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Annotated, Any

import tide_runtime
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
from benchmarks.models.gguf_files import GGUF_MODELS, folder_of
from benchmarks.models.model_folders import CACHE
from benchmarks.tasks.task_set import load_tasks

CELLS = tuple((batch, temperature) for batch in (1, 8) for temperature in (0.0, 0.8))
PROMPT_TOKENS = 64
LEAST_TOKENS = 16  # of a task that counts as the worst: shorter ones are all noise
TASK_ROUNDS = 3


@dataclass(frozen=True)
class Rule:
    """What is switched off, and where.

    Args:
        policies: that the rule concerns on the demo models.
        without: fields of `DepthTuning` or `DepthOptions` that switch it off.
        both: fields that both variants have.
        tasks: whether the rule concerns single texts without exits, as the tasks are.
    """

    policies: tuple[str, ...]
    without: Mapping[str, Any]
    both: Mapping[str, Any] = field(default_factory=dict)
    tasks: bool = False


RULES = {
    "cooldown": Rule(("exact", "exit"), {"cooldown": 0}),
    "exit_expectation": Rule(("exit",), {"exit_expectation_weight": 1.0}),
    "batch_gate": Rule(("exact", "exit"), {"least_batch_speedup": 0.0}),
    "padding_penalty": Rule(("exact",), {"padding_penalty": 0.0}),
    "few_drafts_first": Rule(("exact",), {"first_exit_drafts": 64}),
    "draft_head": Rule(("exact",), {"head_draft_limit": 0}),
    "exits_with_text": Rule(("exact",), {"draft": "ngram"}, both={"head_draft_limit": 0}),
    "successors": Rule(("exact",), {"successor_entries": 0}, tasks=True),
    "observed_passes": Rule((), {"clock_rate": 0.0}, tasks=True),
    "hit_rate_classes": Rule(("exact",), {"usual_hit_rates": ((1, 0.6),)}, tasks=True),
    "hit_rate_learning": Rule(("exact",), {"hit_rate_weight": 1e9}, tasks=True),
}
REPEATABLE = {"clock_rate": 0.0}  # or launches would depend on the clock

console = Console(width=max(150, Console().width))


def _options(changes: Mapping[str, Any]) -> DepthOptions:
    constants = {one.name for one in fields(DepthTuning)}
    tuning = DepthTuning(**{name: value for name, value in changes.items() if name in constants})
    return DepthOptions(tuning=tuning, **{name: value for name, value in changes.items() if name not in constants})


def run_cell(
    weights: Engine, policy: str, batch: int, temperature: float, groups: Sequence[Group], new_tokens: int
) -> list[dict[str, Any]]:
    """A row for each rule of ``policy`` in one cell."""
    params = GenerationParams(max_new_tokens=new_tokens, temperature=temperature, ignore_eos=True)
    place = {"batch": batch, "temperature": temperature}
    rules = {name: rule for name, rule in RULES.items() if policy in rule.policies}
    return [{**place, "rule": name, **_earned(weights, policy, batch, rule, groups, params)} for name, rule in rules.items()]


def _earned(
    weights: Engine, policy: str, batch: int, rule: Rule, groups: Sequence[Group], params: GenerationParams
) -> dict[str, Any]:
    """Percent of the time that a rule saves: positive where the variant without it is slower, per token generated. Both variants
    have fresh engines, as an engine learns from its requests."""
    with ExitStack() as stack:
        arms, seen = [], (LaunchCounts(), LaunchCounts())
        for launches, switched in zip(seen, ({}, rule.without), strict=True):
            depth = _options({**REPEATABLE, **rule.both, **switched})
            options = replace(weights.options, policy=policy, depth=depth, max_batch=batch)
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


def drafting_size() -> tuple[int, int]:
    """Constants that control drafting, and lines of the files that decide.

    Constants are the fields of `DepthTuning` but those of policy ``exit`` alone, which are named for it. Lines are those of
    policy ``exact`` and of ``depth/speculation`` without the drafters, which find drafts and decide nothing.
    """
    depth, drafters = Path(tide_runtime.__file__).parent / "depth", ("text", "successors", "grammar", "head", "exits")
    files = [path for path in (depth / "speculation").glob("*.py") if path.stem not in drafters]
    lines = sum(len(path.read_text("utf-8").splitlines()) for path in [*files, depth / "exact.py"])
    return sum(not one.name.startswith("exit_") for one in fields(DepthTuning)), lines


@dataclass(frozen=True)
class TaskPrompt:
    kind: str
    ids: Sequence[int]


def task_prompts(engine: Engine, of_each_kind: int) -> list[TaskPrompt]:
    """First turns of ``of_each_kind`` tasks of every kind, with the model's chat template; neighbours are of different kinds."""
    kinds = load_tasks()
    found = []
    for number, kind in product(range(of_each_kind), kinds):
        system = [{"role": "system", "content": kind.system}] if kind.system is not None else []
        prompt = engine.chat_prompt([*system, {"role": "user", "content": kind.tasks[number].turns[0]}])
        found.append(TaskPrompt(kind.kind, prompt))
    return found


def run_tasks(weights: Engine, prompts: Sequence[TaskPrompt], new_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each rule that concerns the tasks: `full`, the default tuning and every variant run each task in turn."""
    params = GenerationParams(max_new_tokens=new_tokens)
    rules = {name: rule for name, rule in RULES.items() if rule.tasks}
    depths = {"default": DepthOptions(), **{name: _options(rule.without) for name, rule in rules.items()}}
    plans = {name: replace(weights.options, policy="exact", depth=depth, max_batch=1) for name, depth in depths.items()}
    plans["full"] = replace(weights.options, policy="full", max_batch=1)
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in prompts] for name in plans}  # by prompt, of each round
    tokens = [0] * len(prompts)
    with ExitStack() as stack:
        arms = {name: EngineArm(name, stack.enter_context(weights.with_options(plan))) for name, plan in plans.items()}
        for arm in arms.values():
            arm.turn([prompts[0].ids], params)
        for number, (index, prompt) in product(range(rounds), enumerate(prompts)):
            salted, shift = replace(params, cache_salt=f"round {number}"), (number + index) % len(arms)
            for name in [*arms][shift:] + [*arms][:shift]:
                turn = arms[name].turn([prompt.ids], salted)
                seconds[name][index].append(turn.seconds)
                tokens[index] = turn.decoded
    chosen = [index for index, decoded in enumerate(tokens) if decoded >= LEAST_TOKENS]
    kinds = [prompts[index].kind for index in chosen]
    times = {name: [own[index] for index in chosen] for name, own in seconds.items()}
    return [{"rule": name, **task_figures(kinds, times[name], times["default"], times["full"])} for name in rules]


Times = Sequence[Sequence[float]]  # seconds of each task, by round


def task_figures(kinds: Sequence[str], without: Times, default: Times, full: Times) -> dict[str, Any]:
    """What a rule saves in percent, over the kinds, and the slowest task against `full` with it and without it."""
    by_kind = defaultdict[str, list[float]](list)
    for kind, ratio in zip(kinds, _ratios(without, default), strict=True):
        by_kind[kind].append(ratio)
    saved = [geometric_mean(ratios) for ratios in by_kind.values()]
    return {
        "measured_pct": 100 * (geometric_mean(saved) - 1),
        "best_kind_pct": 100 * (max(saved) - 1),
        "worst_kind_pct": 100 * (min(saved) - 1),
        "geomean_vs_full": geometric_mean(_ratios(full, default)),
        "geomean_vs_full_without": geometric_mean(_ratios(full, without)),
        "worst_vs_full": min(_ratios(full, default)),
        "worst_vs_full_without": min(_ratios(full, without)),
    }


def _ratios(slower: Times, faster: Times) -> list[float]:
    """The median over its rounds of ``slower`` over ``faster``, for each task."""
    return [median(a / b for a, b in zip(*pair, strict=True)) for pair in zip(slower, faster, strict=True)]


def _print(model: str, rows: Sequence[dict[str, Any]]) -> None:
    cells = [cell for cell in CELLS if any((row["batch"], row["temperature"]) == cell for row in rows)]
    table = Table("rule", "policy", *(f"batch {b}, T {t:g}: simulated / measured %" for b, t in cells), title=model)
    for policy, rule in dict.fromkeys((row["policy"], row["rule"]) for row in rows):
        found = {(row["batch"], row["temperature"]): row for row in rows if (row["policy"], row["rule"]) == (policy, rule)}
        texts = [f"{found[c]['simulated_pct']:+.1f} / {found[c]['measured_pct']:+.1f}" if c in found else "" for c in cells]
        table.add_row(rule, policy, *texts)
    console.print(table)


def _print_tasks(rows: Sequence[dict[str, Any]]) -> None:
    table = Table("rule", "measured %", "best kind", "worst kind", "geomean vs full", "worst task vs full", title="tasks, int4")
    for row in rows:
        both = (f"{row[name]:.3f} / {row[f'{name}_without']:.3f}" for name in ("geomean_vs_full", "worst_vs_full"))
        table.add_row(row["rule"], *(f"{row[f'{p}_pct']:+.1f}" for p in ("measured", "best_kind", "worst_kind")), *both)
    console.print(table)


def main(
    models: Annotated[str, typer.Option(help="Demo models, separated by commas.")] = "layerskip,stock",
    prompts: Annotated[int, typer.Option(min=8, help="Held-out prompts of 64 tokens.")] = 16,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens of each sequence.")] = 48,
    tasks: Annotated[int, typer.Option(min=0, help="Tasks of each kind.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="layerskip and the tasks, without the other demo model.")] = False,
    bundle: Annotated[Path | None, typer.Option(help="A calibrated bundle instead of the demo models.")] = None,
    task_bundle: Annotated[Path | None, typer.Option(help="A bundle for the tasks instead of int4 SmolLM2.")] = None,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Switch off each rule of drafting and early exits in turn."""
    if quick:
        models = "layerskip"
    ids = [prompt.ids for prompt in held_out_prompts(prompts, PROMPT_TOKENS, "library")]
    report = Report("ablation", models=models, prompts=prompts, new_tokens=new_tokens, tasks=tasks)
    if tasks:
        folder = task_bundle or folder_of("int4", GGUF_MODELS["smollm2"], cache / "smollm2")
        with load_second(folder) as weights:
            rows = run_tasks(weights, task_prompts(weights, tasks), new_tokens, TASK_ROUNDS)
        report.rows += [{"model": "tasks", **row, "earned_pct": row["measured_pct"]} for row in rows]
        _print_tasks(rows)
    for model in [bundle.name] if bundle is not None else filter(None, models.split(",")):
        with load_second(bundle or calibrated_bundles(model, cache)[1]) as weights:
            for policy, (batch, temperature) in product(("exact", "exit"), CELLS):
                groups = [ids[i : i + batch] for i in range(0, len(ids) - batch + 1, batch)]
                with console.status(f"{model}, {policy}, batch {batch}, temperature {temperature:g}"):
                    rows = run_cell(weights, policy, batch, temperature, groups, new_tokens)
                report.rows += [{"model": model, **row, "earned_pct": row["simulated_pct"]} for row in rows]
        _print(model, [row for row in report.rows if row["model"] == model])
    earned = {name: [row["earned_pct"] for row in report.rows if row["rule"] == name] for name in RULES}
    best = {name: max(own) for name, own in earned.items() if own}
    for name, most in best.items():
        report.add(f"best_{name}_pct", most)
    constants, lines = drafting_size()
    report.add("drafting_constants", constants)
    report.add("drafting_lines", lines)
    report.add("rules", len(best))
    report.add("rules_that_earn_1pct", sum(most >= 1 for most in best.values()))
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
