"""Eight kinds of work, ten tasks each: how much faster than `full` the default policy decodes, and that its text is the same.

    python -m benchmarks.tasks                                  # SmolLM2-135M, fp32 and int4, alone and in batches: 12 minutes
    python -m benchmarks.tasks --quick                          # int4 alone, three of each kind: 3 minutes
    python -m benchmarks.tasks --calibrated BUNDLE              # also a bundle that was calibrated and exported in fp32: 5 more
    python -m benchmarks.tasks --prompts FOLDER --json build/tasks.json
    python -m benchmarks.tasks --prompts benchmarks/tasks/second_prompts    # a second set, of five tasks each

Each task runs under `full` and under `auto` of the same bundle in turn, with the model's chat template, greedy. The pool of
recent outputs is off, as a second round would find its own text there. Speedups are of decoding: the time behind the first token,
the median of the rounds of a task. In batches the first turns of eight tasks, one of each kind, are submitted together. The score
is what a program can check of a reply (`checks`): 0 to 1, and above 0 for some tasks whatever the reply is. The folder
benchmarks/tasks/second_prompts is a second set, written after the policies were final and never used to change them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Annotated, Any

import typer
from rich.progress import Progress
from tide_bench.arms.base import with_limitation
from tide_bench.arms.tide import limitation
from tide_bench.report import Report
from tide_bench.tables import console
from tide_runtime import DepthOptions, Engine, EngineOptions, ThreadOptions
from tide_runtime.depth_tuning import DepthTuning

from benchmarks.models.gguf_files import GGUF_MODELS, folder_of
from benchmarks.models.model_folders import CACHE
from benchmarks.tasks.checks import score
from benchmarks.tasks.task_run import (
    PairedBatch,
    PairedTask,
    differing_tokens,
    mixed_groups,
    run_batch,
    run_paired,
)
from benchmarks.tasks.task_set import PROMPTS, TaskKind, load_tasks

WEIGHTS = ("fp32", "int4")
QUICK_TASKS = 3
BATCH = 8
BATCH_WEIGHTS = "fp32"
PROMPTS_HELP = (
    "Folder of task files; benchmarks/tasks/second_prompts is a second set, written after the policies were final and never used "
    "to change them."
)

KIND_COLUMNS = ("kind", "tasks", "tokens", "full, tokens/s", "speedup", "worst", "tokens/pass", "accepted", "layers", "score")
CALIBRATED = "calibrated fp32"
# Names of results: of the mean over all tasks, and before all others, by weights.
GEOMEANS = {"fp32": "default_geomean", "int4": "int4_default_geomean", CALIBRATED: "calibrated_geomean"}
PREFIXES = {"fp32": "", "int4": "int4_", CALIBRATED: "calibrated_"}


def load_pair(folder: Path, batch: int) -> tuple[Engine, Engine]:
    """Engines of policy `full` and `auto` on the same weights."""
    options = EngineOptions(policy="full", max_batch=batch, threads=ThreadOptions(shared=True), verify=False)
    full = Engine.load(folder, options, device="cpu")
    without_pool = DepthOptions(tuning=DepthTuning(pool_tokens=0))
    return full, full.with_options(replace(full.options, policy="auto", depth=without_pool))


def task_row(paired: PairedTask, kinds: dict[str, TaskKind], weights: str, title: str) -> dict[str, Any]:
    """What the JSON file keeps of a task. ``title``: of its weights, with what the default policy is on them."""
    full, other = paired.full_run, paired.other_run
    assert full is not None and other is not None
    task = next(task for task in kinds[paired.kind].tasks if task.id == paired.id)
    drafted = sum(sum(reply.stats.drafted.values()) for reply in other.replies)
    accepted = sum((Counter(reply.stats.accepted) for reply in other.replies), Counter[str]())
    passes = sum(reply.stats.deep_passes for reply in other.replies)
    return {
        "weights": weights,
        "title": title,
        "kind": paired.kind,
        "id": paired.id,
        "rounds": len(paired.full),
        "speedup": paired.speedup,
        "tokens": len(full.token_ids),
        "full_tokens_per_s": full.decoded_tokens / full.decode_s if full.decoded_tokens else 0.0,
        "drafted": drafted,
        "accepted": accepted.total(),
        "accepted_by": dict(accepted),
        "tokens_per_pass": other.decoded_tokens / passes if passes else 1.0,
        "layers_per_token": fmean(reply.stats.layers_per_token for reply in other.replies),
        "differing_tokens": differing_tokens(other.token_ids, full.token_ids),
        "score_full": score(task, full.texts),
        "score": score(task, other.texts),
    }


def kind_rows(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """`KIND_COLUMNS` of every kind among the tasks of one model, by name."""
    return [_cells(kind, [row for row in rows if row["kind"] == kind]) for kind in sorted({row["kind"] for row in rows})]


def _cells(kind: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    drafted = sum(row["drafted"] for row in rows)
    return [
        kind,
        str(len(rows)),
        f"{fmean(row['tokens'] for row in rows):.0f}",
        f"{median(row['full_tokens_per_s'] for row in rows):.0f}",
        f"{median(row['speedup'] for row in rows):.2f}",
        f"{min(row['speedup'] for row in rows):.2f}",
        f"{fmean(row['tokens_per_pass'] for row in rows):.2f}",
        f"{sum(row['accepted'] for row in rows) / drafted:.0%}" if drafted else "",
        f"{fmean(row['layers_per_token'] for row in rows):.1f}",
        f"{fmean(row['score'] for row in rows):.2f}",
    ]


def add_tables(report: Report, rows: Sequence[dict[str, Any]]) -> None:
    """Every kind of work at every precision."""
    results, kinds, notes = report.results, list[list[str]](), list[str]()
    for weights in dict.fromkeys(row["weights"] for row in rows):
        own, prefix = [row for row in rows if row["weights"] == weights], PREFIXES[weights]
        kinds += [[own[0]["title"], *cells] for cells in kind_rows(own)]
        notes.append(f"{weights} {results[GEOMEANS[weights]]:.2f}x, worst {results[f'{prefix}worst_prompt']:.2f}x")
    note = f"All {len(rows)} tasks, geometric mean: {'; '.join(notes)}."
    if "batch8_geomean" in results:
        note += f" Batches of {BATCH}, fp32: {results['batch8_geomean']:.2f}x, worst {results['batch8_worst']:.2f}x."
    note += f" Tokens that differ from `full`'s: {results['differing_tokens']:.0f}."
    report.table(
        f"Kinds of work, {report.settings['prompts']}",
        ["weights", *KIND_COLUMNS],
        kinds,
        f"{report.settings['model']}, the default policy without a calibration (`exact` with text drafts) against `full`, "
        "batch 1, chat template, greedy, empty caches. Speedup of decoding over `full`, median and worst task. Layers: "
        "launched per token. Score: 0 to 1.",
        [note],
    )


def add_results(report: Report, rows: Sequence[dict[str, Any]], batches: Sequence[PairedBatch]) -> None:
    for weights in dict.fromkeys(row["weights"] for row in rows):
        own, prefix = [row for row in rows if row["weights"] == weights], PREFIXES[weights]
        report.add(GEOMEANS[weights], geometric_mean(row["speedup"] for row in own))
        for kind in sorted({row["kind"] for row in own}):
            report.add(f"{prefix}{kind}", median(row["speedup"] for row in own if row["kind"] == kind))
        report.add(f"{prefix}worst_prompt", min(row["speedup"] for row in own))
        accepted = sum((Counter(row["accepted_by"]) for row in own), Counter[str]())
        tokens = sum(row["tokens"] for row in own)
        for drafter, count in sorted(accepted.items()):
            report.add(f"{prefix}{drafter}_share", count / tokens)
    if batches:
        report.add("batch8_geomean", geometric_mean(batch.speedup for batch in batches))
        report.add("batch8_worst", min(batch.speedup for batch in batches))
    different = sum(row["differing_tokens"] for row in rows) + sum(batch.differing_tokens for batch in batches)
    report.add("differing_tokens", different)


def main(
    weights: Annotated[str, typer.Option(help=f"Of SmolLM2-135M-Instruct, of {', '.join(WEIGHTS)}.")] = ",".join(WEIGHTS),
    prompts: Annotated[Path, typer.Option(help=PROMPTS_HELP)] = PROMPTS,
    tasks: Annotated[int | None, typer.Option(min=1, help="Only so many of each kind.")] = None,
    calibrated: Annotated[Path | None, typer.Option(help="A calibrated bundle of the model in fp32.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"int4 alone, no batches, {QUICK_TASKS} tasks of each kind.")] = False,
    batches: Annotated[bool, typer.Option(help=f"Also run batches of {BATCH}, in {BATCH_WEIGHTS}.")] = True,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Compare the default policy with `full` on eight kinds of work."""
    if quick:
        weights, tasks, batches = "int4", QUICK_TASKS, False
    chosen = weights.split(",") if weights else []
    if unknown := [name for name in chosen if name not in WEIGHTS]:
        raise typer.BadParameter(f"weights are {', '.join(unknown)}; give some of {', '.join(WEIGHTS)}")
    kinds = [TaskKind(k.kind, k.max_new_tokens, k.tasks[:tasks], k.system) for k in load_tasks(prompts)]
    by_name = {kind.kind: kind for kind in kinds}
    report = Report("tasks", model="SmolLM2-135M-Instruct", weights=weights, tasks=tasks, prompts=prompts.name)
    groups = mixed_groups(kinds, BATCH) if batches and BATCH_WEIGHTS in chosen else []
    measured: list[PairedBatch] = []
    folders: dict[str, Callable[[], Path]] = {
        name: partial(folder_of, name, GGUF_MODELS["smollm2"], cache / "smollm2") for name in chosen
    }
    if calibrated is not None:
        folders[CALIBRATED] = partial(Path, calibrated)
    total = len(folders) * sum(len(kind.tasks) for kind in kinds) + len(groups)
    with Progress(console=console()) as progress, ExitStack() as stack:
        bar = progress.add_task("tasks", total=total)
        for name, folder in folders.items():
            progress.update(bar, description=f"loading {name}")
            full, auto = (stack.enter_context(engine) for engine in load_pair(folder(), BATCH))
            title = with_limitation(name, limitation(auto))
            for kind in kinds:
                progress.update(bar, description=f"{name} {kind.kind}")
                for task in kind.tasks:
                    report.rows.append(task_row(run_paired(full, auto, kind, task), by_name, name, title))
                    progress.advance(bar)
            for group in groups if name == BATCH_WEIGHTS else []:
                progress.update(bar, description=f"{name}, batches of {BATCH}")
                measured.append(run_batch(full, auto, group))
                progress.advance(bar)
    add_results(report, report.rows, measured)
    add_tables(report, report.rows)
    for batch in measured:
        report.rows.append({"weights": BATCH_WEIGHTS, "batch": list(batch.ids), "speedup": batch.speedup})
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
