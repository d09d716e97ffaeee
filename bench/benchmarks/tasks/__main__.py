"""Eight kinds of work, ten tasks each: how fast the default policy decodes, beside `full` of the same bundle and other engines.

    python -m benchmarks.tasks                                  # SmolLM2-135M as w8a8 and in int4: 12 minutes
    python -m benchmarks.tasks --weights fp32                   # fp32, alone and in batches: 15 minutes
    python -m benchmarks.tasks --quick                          # two of each kind: 2 minutes
    python -m benchmarks.tasks --calibrated BUNDLE              # also a bundle that was calibrated, in fp32 or int4: 5 more
    python -m benchmarks.tasks --prompts FOLDER --json build/tasks.json
    python -m benchmarks.tasks --prompts bench/benchmarks/tasks/second_prompts    # a second set, of five tasks each

Each task runs under `full` and under `auto` of the same bundle in turn, with the model's chat template, greedy, then by a peer on
the same prompts for as many tokens: w8a8 and int4 beside onnxruntime-genai int4 (made from the same dequantised weights by its
own defaults, on all cores, which is the faster of its settings), source in the kinds chat and turns beside llama.cpp.
Times are of decoding, behind the first token of each reply. A round runs every task once, in a fixed order and under a cache
salt of its own, so that what drafts for a task is its own text and the engine's replies to the tasks before it, never another
run of the task. In batches the first turns of eight tasks, one of each kind, are submitted together, and every batch has its own
salt. The folder bench/benchmarks/tasks/second_prompts is a second set, written after the policies were final and never used to
change them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Annotated, Any

import typer
from rich.progress import Progress
from tide_bench.arms.base import with_limitation
from tide_bench.arms.process import ArmError, ArmProcess
from tide_bench.arms.tide import limitation
from tide_bench.report import Report
from tide_bench.tables import console
from tide_runtime import Engine, EngineOptions, ThreadOptions, TideError
from tide_runtime.bundle.manifest import read_manifest

from benchmarks.chosen_names import chosen_names
from benchmarks.models.gguf_files import SLOTS, folder_of
from benchmarks.models.model_folders import CACHE
from benchmarks.tasks.task_run import (
    PairedBatch,
    PairedTask,
    differing_tokens,
    mixed_groups,
    run_batch,
    run_round,
)
from benchmarks.tasks.task_set import PROMPTS, TaskKind, load_tasks

WEIGHTS = ("fp32", "int4", "w8a8", "source")
QUICK_TASKS = 2
MIN_TOKENS = 16  # of a reply that counts as the worst: shorter ones are all noise
CHATS = ("chat", "turns")  # the kinds of work in the file's own blocks
# By weights: the arm beside them, and its name.
PEERS = {**dict.fromkeys(("int4", "w8a8"), ("genai-int4", "onnxruntime-genai")), "source": ("llamacpp", "llama.cpp")}
# Weights that run beside onnxruntime-genai: results of the mean over kinds, and before those of the worst kind.
GENAI_MEANS = (("int4", "auto_vs_genai_tasks", "auto_vs_genai"), ("w8a8", "w8a8_auto_vs_genai", "w8a8_auto_vs_genai"))
BATCH = 8
BATCH_WEIGHTS = "fp32"
PROMPTS_HELP = "Folder of task files; bench/benchmarks/tasks/second_prompts is a second set, never used to change a policy."

KIND_COLUMNS = ("kind", "tasks", "tokens", "full, tokens/s", "speedup", "worst", "tokens/pass", "accepted", "over peer")
# Names of results: of the mean over all tasks, and before all others, by weights.
PREFIXES = {"fp32": "", "int4": "int4_", "w8a8": "w8a8_", "source": "source_"}
PREFIXES |= {"calibrated fp32": "calibrated_", "calibrated int4": "calibrated_int4_"}
GEOMEANS = {name: f"{prefix}{'' if 'calibrated' in name else 'default_'}geomean" for name, prefix in PREFIXES.items()}


def load_pair(folder: Path, batch: int) -> tuple[Engine, Engine]:
    """Engines of policy `full` and `auto` on the same weights."""
    options = EngineOptions(policy="full", max_batch=batch, threads=ThreadOptions(shared=True), verify=False)
    full = Engine.load(folder, options, device="cpu")
    return full, full.with_options(replace(full.options, policy="auto"))


def task_row(paired: PairedTask, weights: str, title: str) -> dict[str, Any]:
    """What the JSON file keeps of a task. ``title``: of its weights, with what the default policy is on them."""
    full, other = paired.full_run, paired.other_run
    assert full is not None and other is not None
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
        "over_peer": paired.over_peer,
        "tokens": len(full.token_ids),
        "full_tokens_per_s": full.decoded_tokens / full.decode_s if full.decoded_tokens else 0.0,
        "drafted": drafted,
        "accepted": accepted.total(),
        "accepted_by": dict(accepted),
        "tokens_per_pass": other.decoded_tokens / passes if passes else 1.0,
        "layers_per_token": fmean(reply.stats.layers_per_token for reply in other.replies),
        "differing_tokens": differing_tokens(other.token_ids, full.token_ids),
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
        f"{_worst(rows):.2f}",
        f"{fmean(row['tokens_per_pass'] for row in rows):.2f}",
        f"{sum(row['accepted'] for row in rows) / drafted:.0%}" if drafted else "",
        f"{geometric_mean(row['over_peer'] for row in rows):.2f}" if rows[0]["over_peer"] is not None else "",
    ]


def _worst(rows: Sequence[dict[str, Any]]) -> float:
    """The smallest speedup over `full`, of replies that are long enough to tell."""
    return min(row["speedup"] for row in [row for row in rows if row["tokens"] >= MIN_TOKENS] or rows)


def add_tables(report: Report, rows: Sequence[dict[str, Any]]) -> None:
    """Every kind of work at every precision."""
    results = report.results
    kinds = list[list[str]]()
    notes = list[str]()
    for weights in dict.fromkeys(row["weights"] for row in rows):
        own = [row for row in rows if row["weights"] == weights]
        prefix = PREFIXES[weights]
        kinds += [[own[0]["title"], *cells] for cells in kind_rows(own)]
        notes.append(f"{weights} {results[GEOMEANS[weights]]:.2f}x, worst {results[f'{prefix}worst_prompt']:.2f}x")
    for weights, mean, name in GENAI_MEANS:
        if mean in results:
            worst = results[f"{name}_worst_kind"]
            notes.append(f"{weights} over onnxruntime-genai int4 {results[mean]:.2f}x, worst kind {worst:.2f}x")
    if "chats_vs_llamacpp" in results:
        notes.append(f"chats in the file's own blocks over llama.cpp {results['chats_vs_llamacpp']:.2f}x")
    note = f"All {len(rows)} tasks, geometric mean: {'; '.join(notes)}."
    if "batch8_geomean" in results:
        note += f" Batches of {BATCH}, fp32: {results['batch8_geomean']:.2f}x, worst {results['batch8_worst']:.2f}x."
    note += f" Tokens that differ from `full`'s: {results['differing_tokens']:.0f}."
    report.table(
        f"Kinds of work, {report.settings['prompts']}",
        ["weights", *KIND_COLUMNS],
        kinds,
        f"{report.settings['model']}, the default policy against `full`, "
        "batch 1, chat template, greedy; drafts come from the text and from replies to earlier tasks. Speedup of decoding over "
        "`full`, median and worst task. Over peer: int4 and w8a8 over onnxruntime-genai int4, source over llama.cpp, for as many "
        "tokens of the same prompts.",
        [note],
    )


def add_results(report: Report, rows: Sequence[dict[str, Any]], batches: Sequence[PairedBatch]) -> None:
    for weights in dict.fromkeys(row["weights"] for row in rows):
        own = [row for row in rows if row["weights"] == weights]
        prefix = PREFIXES[weights]
        report.add(GEOMEANS[weights], geometric_mean(row["speedup"] for row in own))
        for kind in sorted({row["kind"] for row in own}):
            report.add(f"{prefix}{kind}", median(row["speedup"] for row in own if row["kind"] == kind))
        report.add(f"{prefix}worst_prompt", _worst(own))
        accepted = sum((Counter(row["accepted_by"]) for row in own), Counter[str]())
        tokens = sum(row["tokens"] for row in own)
        for drafter, count in sorted(accepted.items()):
            report.add(f"{prefix}{drafter}_share", count / tokens)
    beside = {weights: [row for row in rows if row["weights"] == weights and row["over_peer"] is not None] for weights in PEERS}
    for weights, mean, name in GENAI_MEANS:
        by_kind = defaultdict[str, list[float]](list)
        for row in beside[weights]:
            by_kind[row["kind"]].append(row["over_peer"])
        if means := [geometric_mean(own) for own in by_kind.values()]:
            report.add(mean, geometric_mean(means))
            report.add(f"{name}_worst_kind", min(means))
    if beside["source"]:
        report.add("chats_vs_llamacpp", geometric_mean(row["over_peer"] for row in beside["source"]))
    if batches:
        report.add("batch8_geomean", geometric_mean(batch.speedup for batch in batches))
        report.add("batch8_worst", min(batch.speedup for batch in batches))
    different = sum(row["differing_tokens"] for row in rows) + sum(batch.differing_tokens for batch in batches)
    report.add("differing_tokens", different)


def start_peer(weights: str, cache: Path, stack: ExitStack) -> ArmProcess | None:
    """The engine beside ``weights``, until ``stack`` ends; None where there is none, or it cannot run, which is printed."""
    if weights not in PEERS:
        return None
    arm, title = PEERS[weights]
    try:
        peer = ArmProcess(arm, folder_of(arm, cache))
        stack.callback(peer.close)
        if arm == "llamacpp":
            peer.call("serve", 1, SLOTS)  # or every longer prompt would load the model again
        peer.generate([[1] * 16], 16)  # memory is allocated
    except (ArmError, RuntimeError, TideError) as error:
        console().print(f"{title} cannot run: {error}", markup=False)
        return None
    return peer


def measure(
    name: str,
    engines: tuple[Engine, Engine],
    peer: ArmProcess | None,
    kinds: Sequence[TaskKind],
    rounds: int,
    tick: Callable[[], None],
) -> list[PairedTask]:
    """Every task of ``kinds``, in rounds: see the top of this file."""
    found = {task.id: PairedTask(kind.kind, task.id) for kind in kinds for task in kind.tasks}
    for number, kind in product(range(rounds), kinds):
        for task in kind.tasks:
            run_round(found[task.id], engines, peer, kind, task, f"{name}, round {number}")
            tick()
    return list(found.values())


def main(
    weights: Annotated[str, typer.Option(help=f"Of SmolLM2-135M-Instruct, of {', '.join(WEIGHTS)}.")] = "w8a8,int4",
    prompts: Annotated[Path, typer.Option(help=PROMPTS_HELP)] = PROMPTS,
    tasks: Annotated[int | None, typer.Option(min=1, help="Only so many of each kind.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each task.")] = 1,
    calibrated: Annotated[list[Path], typer.Option(help="A calibrated bundle of the model, in fp32 or int4.")] = [],  # noqa: B006
    quick: Annotated[bool, typer.Option("--quick", help=f"Without fp32 and batches, {QUICK_TASKS} tasks of each kind.")] = False,
    batches: Annotated[bool, typer.Option(help=f"Run {BATCH_WEIGHTS} in batches of {BATCH}, too.")] = True,
    peers: Annotated[bool, typer.Option(help="Also run onnxruntime-genai and llama.cpp.")] = True,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Compare the default policy with `full` and other engines on eight kinds of work."""
    if quick:
        weights = "w8a8,int4"
        tasks = QUICK_TASKS
        batches = False
    chosen = chosen_names(weights, WEIGHTS, "weights") if weights else []
    kinds = [TaskKind(k.kind, k.max_new_tokens, k.tasks[:tasks], k.system) for k in load_tasks(prompts)]
    kinds_of = {name: [k for k in kinds if name != "source" or k.kind in CHATS] for name in PREFIXES}
    report = Report("tasks", model="SmolLM2-135M-Instruct", weights=weights, tasks=tasks, prompts=prompts.name, rounds=rounds)
    groups = mixed_groups(kinds, BATCH) if batches and BATCH_WEIGHTS in chosen else []
    measured: list[PairedBatch] = []
    folders: dict[str, Callable[[], Path]] = {name: partial(folder_of, name, cache) for name in chosen}
    for bundle in calibrated:
        folders[f"calibrated {'int4' if read_manifest(bundle).weights else 'fp32'}"] = partial(Path, bundle)
    total = len(groups) + rounds * sum(len(kind.tasks) for name in folders for kind in kinds_of[name])
    with Progress(console=console()) as progress:
        bar = progress.add_task("tasks", total=total)
        tick = partial(progress.advance, bar)
        for name, folder in folders.items():
            progress.update(bar, description=f"{name}")
            with ExitStack() as stack:
                full, auto = (stack.enter_context(engine) for engine in load_pair(folder(), BATCH))
                title = with_limitation(name, limitation(auto))
                peer = start_peer(name, cache, stack) if peers else None
                done = measure(name, (full, auto), peer, kinds_of[name], rounds, tick)
                report.rows += [task_row(paired, name, title) for paired in done]
                for group in groups if name == BATCH_WEIGHTS else []:
                    measured.append(run_batch(full, auto, group))
                    tick()
    add_results(report, report.rows, measured)
    add_tables(report, report.rows)
    for batch in measured:
        report.rows.append({"weights": BATCH_WEIGHTS, "batch": list(batch.ids), "speedup": batch.speedup})
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
