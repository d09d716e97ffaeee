"""Ten kinds of work: how fast the default policy decodes, beside `full` of the same bundle and other engines.

    python -m benchmarks.tasks                                  # SmolLM2-135M as w8a8 and in int4
    python -m benchmarks.tasks --model FILE.gguf --weights w8a8 --tasks 6    # another model, 6 tasks of each kind
    python -m benchmarks.tasks --quick                          # two of each kind: 3 minutes
    python -m benchmarks.tasks --calibrated BUNDLE              # also a bundle that was calibrated, in fp32 or int4: 5 more
    python -m benchmarks.tasks --prompts FOLDER --json build/tasks.json
    python -m benchmarks.tasks --prompts bench/benchmarks/tasks/second_prompts    # a second set, of five tasks each

Each task runs under `full` and under `auto` of the same bundle in turn, with the model's chat template, greedy, then by peers on
the same prompts for as many tokens: w8a8 beside onnxruntime-genai int4 (made from the same dequantised weights by its own
defaults, on all cores, which is the faster of its settings), beside llama.cpp on the file, without drafts and with its own
(ngram-mod), and beside OpenVINO GenAI on the file, or in 8 bits where it cannot read it; int4 beside onnxruntime-genai, source
beside llama.cpp.
Times are of decoding, behind the first token of each reply. A round runs every task once, in a fixed order and under a cache
salt of its own, so that what drafts for a task is its own text and the engine's replies to the tasks before it, never another
run of the task. A task says what a right reply contains (see `benchmarks.tasks.task_set`). A model that fails a task often
repeats itself, which is easy to draft, so speed is also given for solved tasks alone. The folder
bench/benchmarks/tasks/second_prompts is a second set, written after the policies were final and never used to change them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
from tide_bench.arms.llamacpp import LlamacppArm
from tide_bench.arms.process import ArmError, ArmProcess
from tide_bench.arms.tide import limitation
from tide_bench.report import Report
from tide_bench.tables import console
from tide_runtime import Engine, EngineOptions, ThreadOptions, TideError
from tide_runtime.bundle.manifest import read_manifest

from benchmarks.chosen_names import chosen_names
from benchmarks.models.gguf_files import smollm2_file
from benchmarks.models.model_folders import CACHE
from benchmarks.models.peer_files import SLOTS, PeerFiles, peer_files
from benchmarks.tasks.task_run import PairedTask, differing_tokens, run_round
from benchmarks.tasks.task_set import PROMPTS, TaskKind, load_tasks

WEIGHTS = ("fp32", "int4", "w8a8", "source")
QUICK_TASKS = 2
MIN_TOKENS = 16  # tokens of a reply that may count as the worst; shorter ones are all noise
# Name of a peer in results → its title in tables.
TITLES = {
    "genai": "onnxruntime-genai int4",
    "llamacpp": "llama.cpp",
    "llamacpp_drafts": "llama.cpp, its drafts",
    "openvino": "OpenVINO GenAI",
}
# Weights → the peers that are measured in turn with them.
PEERS = {"w8a8": tuple(TITLES), "int4": ("genai",), "source": ("llamacpp", "llamacpp_drafts")}
PROMPTS_HELP = "Folder of task files; bench/benchmarks/tasks/second_prompts is a second set, never used to change a policy."

KIND_COLUMNS = ["kind", "tasks", "solved", "tokens", "full, tokens/s", "speedup", "worst", "tokens/pass", "accepted"]
# Weights → prefix of the names of their results.
PREFIXES = {"fp32": "", "int4": "int4_", "w8a8": "w8a8_", "source": "source_"}
PREFIXES |= {"calibrated fp32": "calibrated_", "calibrated int4": "calibrated_int4_"}
Row = dict[str, Any]


def load_pair(folder: Path) -> tuple[Engine, Engine]:
    """Engines of policy `full` and `auto` on the same weights."""
    options = EngineOptions(policy="full", threads=ThreadOptions(shared=True), verify=False)
    full = Engine.load(folder, options, device="cpu")
    return full, full.with_options(replace(full.options, policy="auto"))


def task_row(paired: PairedTask, weights: str, title: str) -> Row:
    """What the JSON file keeps of a task. ``title``: of its weights, with what the default policy is on them."""
    full = paired.full_run
    other = paired.other_run
    assert full is not None and other is not None
    accepted = sum((Counter(reply.stats.accepted) for reply in other.replies), Counter[str]())
    passes = sum(reply.stats.deep_passes for reply in other.replies)
    return {
        "weights": weights,
        "title": title,
        "kind": paired.kind,
        "id": paired.task.id,
        "rounds": len(paired.full),
        "solved": paired.solved,
        "speedup": paired.speedup,
        "over": paired.over_peers,
        "tokens": len(full.token_ids),
        "full_tokens_per_s": full.decoded_tokens / full.decode_s if full.decoded_tokens else 0.0,
        "drafted": sum(sum(reply.stats.drafted.values()) for reply in other.replies),
        "accepted": accepted.total(),
        "accepted_by": dict(accepted),
        "tokens_per_pass": other.decoded_tokens / passes if passes else 1.0,
        "layers_per_token": fmean(reply.stats.layers_per_token for reply in other.replies),
        "differing_tokens": differing_tokens(other.token_ids, full.token_ids),
    }


def by_kind(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {kind: [row for row in rows if row["kind"] == kind] for kind in sorted({row["kind"] for row in rows})}


def peers_of(rows: Sequence[Row]) -> list[str]:
    """The peers that ran beside all of ``rows``."""
    return [name for name in TITLES if rows and all(name in row["over"] for row in rows)]


def kind_cells(kind: str, rows: Sequence[Row]) -> list[str]:
    """`KIND_COLUMNS` of the rows of one kind, then a cell for each peer."""
    drafted = sum(row["drafted"] for row in rows)
    judged = [row for row in rows if row["solved"] is not None]
    return [
        kind,
        str(len(rows)),
        str(sum(row["solved"] for row in judged)) if judged else "",
        f"{fmean(row['tokens'] for row in rows):.0f}",
        f"{median(row['full_tokens_per_s'] for row in rows):.0f}",
        f"{median(row['speedup'] for row in rows):.2f}",
        f"{_worst(rows):.2f}",
        f"{fmean(row['tokens_per_pass'] for row in rows):.2f}",
        f"{sum(row['accepted'] for row in rows) / drafted:.0%}" if drafted else "",
        *(f"{_over(rows, name):.2f}" if name in peers_of(rows) else "" for name in TITLES),
    ]


def _worst(rows: Sequence[Row]) -> float:
    """The smallest speedup over `full`, of replies that are long enough to tell."""
    return min(row["speedup"] for row in [row for row in rows if row["tokens"] >= MIN_TOKENS] or rows)


def _over(rows: Sequence[Row], peer: str) -> float:
    return geometric_mean(row["over"][peer] for row in rows)


def add_results(report: Report, rows: Sequence[Row]) -> None:
    """Figures of every form of weights: speedups over `full`, and over each peer as the mean over kinds and in the worst kind."""
    for weights in dict.fromkeys(row["weights"] for row in rows):
        own = [row for row in rows if row["weights"] == weights]
        prefix = PREFIXES[weights]
        kinds = by_kind(own)
        report.add(f"{prefix}speedup", geometric_mean(row["speedup"] for row in own))
        for kind, of_kind in kinds.items():
            report.add(f"{prefix}{kind}", median(row["speedup"] for row in of_kind))
        report.add(f"{prefix}worst_prompt", _worst(own))
        accepted = sum((Counter(row["accepted_by"]) for row in own), Counter[str]())
        tokens = sum(row["tokens"] for row in own)
        for drafter, count in sorted(accepted.items()):
            report.add(f"{prefix}{drafter}_share", count / tokens)
        solved = [row for row in own if row["solved"]]
        failed = [row for row in own if row["solved"] is False]
        for name, some in (("solved", solved), ("failed", failed)):
            if some:
                report.add(f"{prefix}{name}_tasks", len(some))
                report.add(f"{prefix}speedup_{name}", geometric_mean(row["speedup"] for row in some))
        for peer in peers_of(own):
            means = [_over(of_kind, peer) for of_kind in kinds.values()]
            report.add(f"{prefix}auto_vs_{peer}", geometric_mean(means))
            report.add(f"{prefix}auto_vs_{peer}_worst_kind", min(means))
            if solved:
                report.add(f"{prefix}auto_vs_{peer}_solved", _over(solved, peer))
    report.add("differing_tokens", sum(row["differing_tokens"] for row in rows))


def add_table(report: Report, rows: Sequence[Row]) -> None:
    """Every kind of work at every precision."""
    results = report.results
    cells = list[list[str]]()
    notes = list[str]()
    for weights in dict.fromkeys(row["weights"] for row in rows):
        own = [row for row in rows if row["weights"] == weights]
        prefix = PREFIXES[weights]
        cells += [[own[0]["title"], *kind_cells(kind, of_kind)] for kind, of_kind in by_kind(own).items()]
        note = f"{weights} {results[f'{prefix}speedup']:.2f}x, worst task {results[f'{prefix}worst_prompt']:.2f}x"
        if f"{prefix}speedup_solved" in results and f"{prefix}speedup_failed" in results:
            note += f", solved {results[f'{prefix}speedup_solved']:.2f}x, failed {results[f'{prefix}speedup_failed']:.2f}x"
        for peer in peers_of(own):
            name = f"{prefix}auto_vs_{peer}"
            note += f"; over {TITLES[peer]} {results[name]:.2f}x, worst kind {results[f'{name}_worst_kind']:.2f}x"
            note += f", on solved tasks {results[f'{name}_solved']:.2f}x" if f"{name}_solved" in results else ""
        notes.append(note)
    report.table(
        f"Kinds of work, {report.settings['prompts']}",
        ["weights", *KIND_COLUMNS, *(f"over {title}" for title in TITLES.values())],
        cells,
        f"{report.settings['model']}, the default policy against `full`, batch 1, chat template, greedy; drafts come from the "
        "text and from replies to earlier tasks. Speedup of decoding over `full`, median and worst task; over a peer: its time "
        "of decoding for as many tokens of the same prompts, geometric mean. *Solved*: replies with what the task asks for.",
        [f"All {len(rows)} tasks, geometric mean: {'; '.join(notes)}. "
         f"Tokens that differ from `full`'s: {results['differing_tokens']:.0f}."],
    )  # fmt: skip


def start_peers(weights: str, files: PeerFiles, stack: ExitStack) -> dict[str, ArmProcess]:
    """The engines beside ``weights``, until ``stack`` ends. One that cannot run is left out, and the reason printed."""
    started = dict[str, ArmProcess]()
    for name in PEERS.get(weights, ()):
        try:
            started[name] = peer = _start(name, files)
            stack.callback(peer.close)
            if name.startswith("llamacpp"):
                peer.call("serve", 1, SLOTS)  # or every longer prompt would load the model again
            peer.generate([[1] * 16], 16)  # memory is allocated
        except (ArmError, RuntimeError, TideError) as error:
            started.pop(name, None)
            console().print(f"{TITLES[name]} cannot run: {error}", markup=False)
    return started


def _start(name: str, files: PeerFiles) -> ArmProcess:
    if name == "genai":
        return ArmProcess("genai-int4", files.of("genai-int4"))
    if name == "llamacpp_drafts":
        return ArmProcess(name, files.file, load=partial(LlamacppArm, flags=("--spec-type", "ngram-mod")))
    try:
        return ArmProcess(name, files.file)
    except ArmError:  # OpenVINO reads few of a GGUF file's types
        return ArmProcess(name, files.of("openvino-q8"))


def measure(
    name: str,
    engines: tuple[Engine, Engine],
    peers: Mapping[str, ArmProcess],
    kinds: Sequence[TaskKind],
    rounds: int,
    tick: Callable[[], None],
) -> list[PairedTask]:
    """Every task of ``kinds``, in rounds: see the top of this file."""
    tasks = {task.id: PairedTask(kind.kind, task) for kind in kinds for task in kind.tasks}
    for number, kind in product(range(rounds), kinds):
        for task in kind.tasks:
            run_round(tasks[task.id], engines, peers, kind, f"{name}, round {number}")
            tick()
    return list(tasks.values())


def main(
    model: Annotated[Path | None, typer.Option(help="A GGUF file. Default: SmolLM2-135M-Instruct.")] = None,
    weights: Annotated[str, typer.Option(help=f"Some of {', '.join(WEIGHTS)}.")] = "w8a8,int4",
    prompts: Annotated[Path, typer.Option(help=PROMPTS_HELP)] = PROMPTS,
    tasks: Annotated[int | None, typer.Option(min=1, help="Only so many of each kind.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each task.")] = 1,
    calibrated: Annotated[list[Path], typer.Option(help="A calibrated bundle of the model, in fp32 or int4.")] = [],  # noqa: B006
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_TASKS} tasks of each kind.")] = False,
    peers: Annotated[bool, typer.Option(help="Also run the other engines.")] = True,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Compare the default policy with `full` and other engines on ten kinds of work."""
    chosen = chosen_names(weights, WEIGHTS, "weights") if weights else []
    tasks = QUICK_TASKS if quick else tasks
    kinds = [replace(kind, tasks=kind.tasks[:tasks]) for kind in load_tasks(prompts)]
    files = peer_files(str(model or smollm2_file()), cache)
    report = Report("tasks", model=files.title, weights=weights, tasks=tasks, prompts=prompts.name, rounds=rounds)
    folders: dict[str, Callable[[], Path]] = {name: partial(files.of, f"tide-{name}") for name in chosen}
    for bundle in calibrated:
        folders[f"calibrated {'int4' if read_manifest(bundle).weights else 'fp32'}"] = partial(Path, bundle)
    with Progress(console=console()) as progress:
        bar = progress.add_task("tasks", total=rounds * len(folders) * sum(len(kind.tasks) for kind in kinds))
        for name, folder in folders.items():
            progress.update(bar, description=f"{name}")
            with ExitStack() as stack:
                full, auto = (stack.enter_context(engine) for engine in load_pair(folder()))
                beside = start_peers(name, files, stack) if peers else {}
                done = measure(name, (full, auto), beside, kinds, rounds, partial(progress.advance, bar))
                report.rows += [task_row(paired, name, with_limitation(name, limitation(auto))) for paired in done]
    add_results(report, report.rows)
    add_table(report, report.rows)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
