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

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated, Any

import typer
from tide_bench.counters import OtherLoad
from tide_bench.output_checks import disagreement_rate, identical_share
from tide_bench.paired_ratio import paired_ratio
from tide_bench.report import Report
from tide_bench.tables import console
from tide_runtime import EngineOptions, GenerationParams

from benchmarks.arms.policy_arms import BASELINE, POLICIES, policy_arms, random_bundle
from benchmarks.arms.turns import Group, Turn, take_turns
from benchmarks.chosen_names import chosen_names
from benchmarks.held_out import SOURCES, held_out_prompts
from benchmarks.models.calibrated_bundles import PERCENTS, calibrated_bundles
from benchmarks.models.model_folders import CACHE

BATCH_ARMS = ("exact_ngram", "exact_router", "exact_both", "exit1")  # what a user would choose from
MODELS = ("layerskip", "stock", "random")
PROMPT_TOKENS = 64
SAMPLED_SHARE = 4  # one prompt in so many for sampling
LEAST_GROUPS = 6  # the bootstrap over fewer is meaningless

HEADINGS = ("model", "batch", "arm", "× full (95%)", "× total", "tokens/s", "layers/token", "disagreement", "drafts kept")
CAPTION = (
    "Ratios are to policy `full` on the same weights, in neighbouring turns (above 1: faster): median over groups of prompts "
    "with its 95% interval, and of the total time; layers: launched for a row, per token; disagreement with `full`: per token "
    "up to the first difference (share of all tokens that differ)."
)


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


def add_tables(report: Report) -> None:
    """A table for every temperature."""
    settings = report.settings
    for temperature in dict.fromkeys(row["temperature"] for row in report.rows):
        rows = [row for row in report.rows if row["temperature"] == temperature]
        load = max(row["other_load"] for row in rows)
        report.table(
            f"Depth policies, fp32, {f'temperature {temperature:g}' if temperature else 'greedy'}",
            HEADINGS,
            ([row["model"], str(row["batch"]), *cells(row)] for row in rows),
            f"{settings['prompts']} held-out prompts, {settings['new_tokens']} new tokens per sequence. {CAPTION}",
            [f"Other processes took at most {load:.0%} of the CPU meanwhile."],
        )
    if "worst_case" in report.results:
        worst, low, high = (report.results[f"worst_case{end}"] for end in ("", "_low", "_high"))
        report.statement("The slowest policy", f"{worst:.2f} ({low:.2f}–{high:.2f}) of all models, batch sizes and temperatures.")


def cells(row: Mapping[str, Any]) -> list[str]:
    """The cells of an arm under `HEADINGS`, from the third on; what it does not have is left empty."""
    ratio = f"{row['ratio_median']:.2f} ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})"
    return [
        row["title"],
        "1" if row["arm"] == BASELINE else ratio,
        "1" if row["arm"] == BASELINE else f"{row['ratio_total']:.2f}",
        f"{row['tokens_per_s']:.0f}",
        f"{row['layers_per_token']:.1f}",
        f"{row['disagreement']:.2%} ({row['differing_tokens']:.1%})" if "disagreement" in row else "",
        " ".join(f"{d} {row[f'accepted_{d}']:.0%}" for d in ("router", "ngram", "head") if f"accepted_{d}" in row),
    ]


def add_policy_results(report: Report) -> None:
    """``ARM_MODEL_bBATCH`` (and ``_t08`` at temperature 0.8) for every ratio, and ``worst_case``, the least of them all."""
    policies = [row for row in report.rows if row["arm"] != BASELINE]
    for row in policies:
        report.add(f"{row['arm']}_{_result_place(row)}", row["ratio_median"])
    for row in policies:
        if "disagreement" in row:
            report.add(f"disagreement_{row['arm']}_{_result_place(row)}", row["disagreement"])
    if policies:
        worst = min(policies, key=lambda row: row["ratio_median"])
        report.add("worst_case", worst["ratio_median"])
        report.add("worst_case_low", worst["ratio_low"])
        report.add("worst_case_high", worst["ratio_high"])


def _result_place(row: Mapping[str, Any]) -> str:
    sampled = f"_t{row['temperature']:g}".replace(".", "") if row["temperature"] else ""
    return f"{row['model']}_b{row['batch']}{sampled}"


def _bundles(model: str, folder: Path | None, cache: Path) -> dict[int, Path]:
    calibrated = "layerskip" if model == "random" else model
    made = {p: folder / f"{calibrated}_{p}" for p in PERCENTS} if folder else calibrated_bundles(calibrated, cache)
    return dict.fromkeys(PERCENTS, random_bundle(made[PERCENTS[0]], cache)) if model == "random" else made


def _names(model: str, case: Case, arms: Sequence[str], batch_arms: Sequence[str]) -> list[str]:
    """Random weights have one bundle, whose exits project no keys and values."""
    names = [name for name in arms if name in batch_arms or case.batch == 1]
    return [n for n in names if model != "random" or (POLICIES[n].percent == PERCENTS[0] and POLICIES[n].depth.kv == "deferred")]


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
    chosen, wanted = chosen_names(models, MODELS, "model"), chosen_names(arms, ARMS, "arm")
    batches = _numbers(batch, int, "batch", 1, EngineOptions().max_batch)
    temperatures = _numbers(temperature, float, "temperature", 0, 2)
    ids = [prompt.ids for prompt in held_out_prompts(prompts, PROMPT_TOKENS, chosen_names(data, SOURCES, "data")[0])]
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
            names = _names(model, case, wanted, chosen_names(batch_arms, ARMS, "arm"))
            place = {"model": model, "batch": case.batch, "temperature": case.temperature}
            with console().status(f"{model}, batch {case.batch}, temperature {case.temperature:g}"):
                rows, load = run_case(made, names, case, new_tokens)
            report.rows += [{**place, "other_load": load, **row} for row in rows]
        if json is not None:
            report.write(json)  # should the next model be interrupted
    add_policy_results(report)
    add_tables(report)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
