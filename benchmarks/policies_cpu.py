"""Depth policies on the CPU, fp32: how much faster than `full` each decodes, and how far its text is `full`'s.

    python -m benchmarks.policies_cpu                          # 16 prompts x 64 tokens: 6 minutes, and 4 to calibrate once
    python -m benchmarks.policies_cpu --prompts 100 --new-tokens 128
    python -m benchmarks.policies_cpu --models layerskip --batch 1 --arms exact_both,exit1 --temperature 0

Every arm is an engine with the public options of its policy, on the weights that `full` runs on, and takes whole turns beside
`full` on the same prompts, the one or the other first. Prompts are windows of 64 tokens from files that neither the models nor
the calibration have seen (see `held_out`; ``--data demo`` takes the demo's own files instead, which the calibration learned
from). Batch 1 runs every arm and every temperature, batches run ``--batch-arms``, greedily; sampling takes a quarter of the
prompts. ``random`` has random weights and a calibration that is wrong about them: the worst that can happen. Other ways to run
the demo models, HF's and the predecessor's among them, are arms of `tide-bench`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.console import Console
from tide_bench.other_load import OtherLoad
from tide_bench.report import Report
from tide_runtime import EngineOptions, GenerationParams

from benchmarks.arms.policy_arms import BASELINE, POLICIES, policy_arms, random_bundle
from benchmarks.arms.turns import Group, take_turns
from benchmarks.held_out import SOURCES, held_out_prompts
from benchmarks.models.calibrated_bundles import PERCENTS, calibrated_bundles
from benchmarks.models.model_folders import CACHE
from benchmarks.tables.arm_figures import speed_figures, text_figures
from benchmarks.tables.policy_table import CAPTION, add_policy_results, print_policy_table

BATCH_ARMS = ("exact_ngram", "exact_router", "exact_both", "exit1")  # what a user would choose from
MODELS = ("layerskip", "stock", "random")
PROMPT_TOKENS = 64
SAMPLED_SHARE = 4  # one prompt in so many for sampling
LEAST_GROUPS = 6  # the bootstrap over fewer is meaningless

console = Console(width=max(170, Console().width))  # piped output would wrap the table at 80


@dataclass(frozen=True)
class Case:
    """One batch size and temperature, and the groups of prompts that run there."""

    batch: int
    temperature: float
    groups: list[Group]


def cases(batches: Sequence[int], temperatures: Sequence[float], prompts: Group) -> list[Case]:
    """Greedily every batch size, otherwise the smallest."""
    chosen = [(batch, t) for t in temperatures for batch in batches if not t or batch == min(batches)]
    return [Case(batch, t, _groups(prompts[: len(prompts) // (SAMPLED_SHARE if t else 1)], batch)) for batch, t in chosen]


def _groups(prompts: Group, size: int) -> list[Group]:
    """``prompts`` by turns of ``size``, a rest that is too few left out; again in other company until there are enough."""
    order, shuffle = [prompts[i % len(prompts)] for i in range(max(size, len(prompts)))], Random(size).shuffle
    groups: list[Group] = []
    while len(groups) < LEAST_GROUPS:
        groups += [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
        shuffle(order)
    return groups


def run_case(bundles: dict[int, Path], names: Sequence[str], case: Case, new_tokens: int) -> tuple[list[dict[str, Any]], float]:
    """A row for each arm, `full` first, and the share of the CPU that other processes took."""
    params = GenerationParams(max_new_tokens=new_tokens, temperature=case.temperature, ignore_eos=True)
    with policy_arms(bundles, [BASELINE, *names], case.batch) as arms:
        for arm in arms.values():
            arm.turn(case.groups[0], params)  # binds every shape
        baseline = arms[BASELINE]
        load = OtherLoad(())
        base, turns = take_turns(baseline, {name: arms[name] for name in names}, case.groups, params)
        rows = []
        for name, own in {BASELINE: base, **turns}.items():
            row = {"arm": name, "title": arms[name].title, **speed_figures(own)}
            rows.append(row if case.temperature else row | text_figures(own, base))
        return rows, load.share()


def _bundles(model: str, folder: Path | None, cache: Path) -> dict[int, Path]:
    calibrated = "layerskip" if model == "random" else model
    made = {p: folder / f"{calibrated}_{p}" for p in PERCENTS} if folder else calibrated_bundles(calibrated, cache)
    return dict.fromkeys(PERCENTS, random_bundle(made[PERCENTS[0]], cache)) if model == "random" else made


def _names(model: str, case: Case, arms: Sequence[str], batch_arms: Sequence[str]) -> list[str]:
    """Random weights have one bundle, whose exits project no keys and values."""
    names = [name for name in arms if name in batch_arms or case.batch == 1]
    return [n for n in names if model != "random" or (POLICIES[n].percent == PERCENTS[0] and POLICIES[n].depth.kv == "deferred")]


def _split(text: str, known: Sequence[str], what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise typer.BadParameter(f"{what} {', '.join(unknown) or 'missing'}; choose from: {', '.join(known)}")
    return names


def _numbers(text: str, kind: type[int] | type[float], what: str, least: float, most: float) -> list[Any]:
    try:
        numbers = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not least <= numbers[0] <= numbers[-1] <= most:
        raise typer.BadParameter(f"{what} is {text!r}; give numbers from {least:g} to {most:g}, separated by commas")
    return numbers


ARMS = tuple(name for name in POLICIES if name != BASELINE)


def main(
    models: Annotated[str, typer.Option(help=f"Models, of {','.join(MODELS)}.")] = ",".join(MODELS),
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8",
    arms: Annotated[str, typer.Option(help=f"Arms, of {','.join(ARMS)}.")] = ",".join(ARMS),
    batch_arms: Annotated[str, typer.Option(help="Those of them that also run in batches.")] = ",".join(BATCH_ARMS),
    temperature: Annotated[str, typer.Option(help="Temperatures; 0 is greedy, others take fewer prompts.")] = "0,0.8",
    prompts: Annotated[int, typer.Option(min=4, help="Held-out prompts of 64 tokens.")] = 16,
    new_tokens: Annotated[int, typer.Option(min=2, help="New tokens a sequence.")] = 64,
    data: Annotated[str, typer.Option(help=f"Where the prompts come from, of {','.join(SOURCES)}.")] = "library",
    bundles: Annotated[Path | None, typer.Option(help="Take MODEL_1 and MODEL_5 from this folder; do not calibrate.")] = None,
    cache: Annotated[Path, typer.Option(help="Where bundles and graphs are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file, after every model.")] = None,
) -> None:
    """Compare depth policies on this machine's CPU."""
    chosen, wanted = _split(models, MODELS, "model"), _split(arms, ARMS, "arm")
    batches = _numbers(batch, int, "batch", 1, EngineOptions().max_batch)
    temperatures = _numbers(temperature, float, "temperature", 0, 2)
    ids = [prompt.ids for prompt in held_out_prompts(prompts, PROMPT_TOKENS, _split(data, SOURCES, "data")[0])]
    report = Report(
        "policies_cpu",
        models=chosen,
        batches=batches,
        temperatures=temperatures,
        prompts=prompts,
        new_tokens=new_tokens,
        data=data,
    )
    for model in chosen:
        made = _bundles(model, bundles, cache)
        for case in cases(batches, temperatures, ids):
            names = _names(model, case, wanted, _split(batch_arms, ARMS, "arm"))
            place = {"model": model, "batch": case.batch, "temperature": case.temperature}
            with console.status(f"{model}, batch {case.batch}, temperature {case.temperature:g}"):
                rows, load = run_case(made, names, case, new_tokens)
            report.rows += [{**place, "other_load": load, **row} for row in rows]
            print_policy_table(console, place, rows, load)
        if json is not None:
            report.write(json)  # should the next model be interrupted
    console.print(CAPTION, style="dim")
    add_policy_results(report)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
