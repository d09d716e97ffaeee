"""Recurrent models: whether their texts are HuggingFace's in every way of making them, and their speed beside llama.cpp.

    python -m benchmarks.hybrids                              # 15 minutes on 2 cores
    python -m benchmarks.hybrids --part rewriting
    python -m benchmarks.hybrids --part texts --families lfm2,mamba2
    python -m benchmarks.hybrids --part speed --shapes granite4h_350m

Texts: tiny random models of every family, exported in fp32, int8 and int4. In fp32 the text of a single caller under `full` is
compared with HuggingFace's `generate`; a difference counts unless the two tokens' logits are less than 1e-4 apart. Against that
text, bit by bit with its log-probabilities: several callers, prompts from the prefix cache, prompts in chunks of 1 to 16 tokens,
preemption, and policy `exact` with drafts from the text, of which random models reject most.

Speed: random weights in Q4_0 in the shapes of Qwen3.5-0.8B, LFM2-1.2B and Granite-4.0-H-350m; llama.cpp reads the same file, in
turn. The share of recurrences and convolutions is that of the time of all nodes in decoding steps.

Rewriting: the code-rewriting tasks of `benchmarks.tasks` under `full` and `exact` with drafts from the text, on a toy that is
trained when build/bench-cache does not hold it (`toy_model`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from tide_bench.report import Report, cores
from tide_bench.tables import console

from benchmarks.arms.plans import add_plan_tables
from benchmarks.chosen_names import chosen_names
from benchmarks.hybrids.families import FAMILIES
from benchmarks.hybrids.rewriting import add_rewriting
from benchmarks.hybrids.speed import PLAN, SLOTS, compare
from benchmarks.hybrids.texts import FamilyRun, run_family
from benchmarks.hybrids.toy_model import toy_bundle, toy_training
from benchmarks.models.hybrid_gguf import HYBRID_SHAPES
from benchmarks.models.model_folders import CACHE
from benchmarks.models.random_gguf import random_model

FORMS = ("fp32", "int8", "int4")
PARTS = ("texts", "rewriting", "speed")
_RESULT = {"qwen35_08b": "qwen35", "lfm2_1b": "lfm2", "granite4h_350m": "granite"}
COLUMNS = ("family", "weights", "texts", "unlike HuggingFace", "differ", "drafted", "accepted", "prefix tokens", "preemptions")


def add_texts(report: Report, families: Sequence[str], forms: Sequence[str], count: int, new_tokens: int) -> None:
    runs: list[FamilyRun] = []
    with ProcessPoolExecutor(cores(), get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run_family, name, forms, count, new_tokens) for name in families]):
            runs += done.result()
            console().print(f"{runs[-1].name} is done", style="dim", markup=False)
    rows = [_row(run) for run in sorted(runs, key=lambda run: (families.index(run.name), forms.index(run.form)))]
    report.rows += rows
    cells = [["" if row[column] is None else str(row[column]) for column in COLUMNS] for row in rows]
    failures = [f"{run.name}, {run.form}: {run.failure}" for run in runs if run.failure]
    report.table("Texts of recurrent models", list(COLUMNS), cells, notes=failures)
    wrong = {row["family"] for row in rows if not row["texts"] or row["unlike HuggingFace"] or row["differ"]}
    report.add("hybrid_families", len({row["family"] for row in rows} - wrong))
    report.add("hybrid_texts", sum(row["texts"] for row in rows))
    report.add("hybrid_unlike_huggingface", sum(row["unlike HuggingFace"] or 0 for row in rows))
    report.add("hybrid_differs", sum(row["differ"] for row in rows))
    report.add("hybrid_rejected_drafts", sum(row["drafted"] - row["accepted"] for row in rows))


def _row(run: FamilyRun) -> dict[str, Any]:
    figures = {key.replace("_", " "): run.figures[key] for key in ("drafted", "accepted", "prefix_tokens", "preemptions")}
    found = {"family": run.name, "weights": run.form, "texts": run.texts, "unlike HuggingFace": run.unlike}
    return {**found, "differ": sum(run.differ.values()), **figures, "differ by way": run.differ}


def add_speed(report: Report, shapes: Sequence[str], minutes: float, rounds: int, folder: Path) -> None:
    for name in shapes:
        with random_model(name, HYBRID_SHAPES[name], folder, SLOTS) as model:
            found = compare(model, minutes, rounds)
        title = f"{name}, random, {HYBRID_SHAPES[name].kind}"
        add_plan_tables(report, PLAN, found.rows, {"llamacpp": "llama.cpp"}, title, "Medians of rounds.")
        report.rows += [row | {"shape": name} for row in found.rows]
        report.settings[name] = found.settings
        for where, ratio in found.ratios.items():
            report.add(f"{_RESULT[name]}_vs_llamacpp_{where}", ratio)
        report.add(f"{_RESULT[name]}_recurrence_pct", 100 * found.recurrent)


def main(
    part: Annotated[str | None, typer.Option(help=f"One of {', '.join(PARTS)}; all when left out.")] = None,
    families: Annotated[str | None, typer.Option(help=f"Some of {', '.join(FAMILIES)}.")] = None,
    forms: Annotated[str, typer.Option(help=f"Some of {', '.join(FORMS)}.")] = ",".join(FORMS),
    shapes: Annotated[str | None, typer.Option(help=f"Some of {', '.join(HYBRID_SHAPES)}.")] = None,
    texts: Annotated[int, typer.Option(min=1, help="Prompts of each family.")] = 16,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each text.")] = 24,
    minutes: Annotated[float, typer.Option(help="Time for the turns of each shape.")] = 1.5,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each arm at most.")] = 8,
    folder: Annotated[Path, typer.Option(help="Where files and bundles lie until it ends.")] = Path("build"),
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Check the texts of recurrent models, and measure their speed."""
    parts = chosen_names(part, PARTS, "part")
    report = Report("hybrids", part=part, texts=texts, new_tokens=new_tokens, minutes=minutes, rounds=rounds)
    if "texts" in parts:
        add_texts(report, chosen_names(families, FAMILIES, "families"), chosen_names(forms, FORMS, "forms"), texts, new_tokens)
    if "rewriting" in parts:
        add_rewriting(report, toy_bundle(CACHE))
        report.settings["toy"] = toy_training(CACHE)
    if "speed" in parts:
        add_speed(report, chosen_names(shapes, HYBRID_SHAPES, "shapes"), minutes, rounds, folder)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
