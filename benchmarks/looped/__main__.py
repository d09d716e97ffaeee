"""Looped models: how much faster `exact` and `exit` decode the looped demo than `full`, and what an Ouro-1.4B takes to export.

    python -m benchmarks.looped                  # 15 minutes on 2 cores, and 10 to calibrate; 8 GB of free disk in --folder
    python -m benchmarks.looped --quick          # fewer prompts, no certificates, no export

The demo is calibrated and exported with default options. Policies take turns with `full` on the same weights, greedily, on
prompts that neither the model nor its calibration has seen. `exit` is certified at 5%; its certificate is also chosen anew on
random quarters of the held-out documents and judged on the others. Ouro-1.4B has random weights; the export with one loop
is that of the same weights once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from tide_bench.report import Report
from tide_runtime.bundle.manifest import read_manifest

from benchmarks.arms.policy_arms import BASELINE
from benchmarks.export_scale import GB, GIB
from benchmarks.held_out import held_out_prompts
from benchmarks.looped.demo import EXACT, EXIT, LOOPS, MODEL, PERCENT, read_held_out, run_batch, violations
from benchmarks.looped.ouro import OURO_1B, export_rows
from benchmarks.models.calibrated_bundles import calibrated_bundles
from benchmarks.models.model_folders import CACHE

PROMPT_TOKENS, NEW_TOKENS = 64, 96
READ_TOKENS = 128  # of a held-out document, behind its prompt
QUICK_PROMPTS = 16
HEADINGS = ("batch", "policy", "× full (95%)", "× total", "tokens/s", "loops of a token", "launched", "drafts kept", "differ")


def add_speeds(report: Report, rows: Sequence[Mapping[str, Any]], prompts: int) -> None:
    caption = (
        f"{prompts} held-out prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new ones. Ratios are to `full` on the same weights "
        "in neighbouring turns: median with its 95% interval, and of the total time. Loops of a token: after how many `exit` "
        "takes it; launched: loops that were run for it, rejected drafts included. Differ: tokens that are not `full`'s."
    )
    load = max(row["other_load"] for row in rows)
    notes = [f"Other processes took at most {load:.0%} of the CPU meanwhile."]
    report.table("Looped demo, fp32", HEADINGS, map(_cells, rows), caption, notes)
    by_place = {(row["arm"], row["batch"]): row for row in rows}
    report.add("looped_exact_speedup", by_place[EXACT, 1]["ratio_median"])
    report.add("looped_exact_total", by_place[EXACT, 1]["ratio_total"])
    report.add("looped_exact_b8", by_place[EXACT, 8]["ratio_median"])
    report.add("looped_loops_speedup", by_place[LOOPS, 1]["ratio_median"])
    report.add("looped_loops_b8", by_place[LOOPS, 8]["ratio_median"])
    report.add("looped_differs", sum(row["differing_tokens"] for row in rows if row["arm"] in (EXACT, LOOPS)))
    report.add(f"looped_{EXIT}_speedup", by_place[EXIT, 1]["ratio_median"])
    report.add(f"looped_{EXIT}_b8", by_place[EXIT, 8]["ratio_median"])
    report.add(f"looped_{EXIT}_loops", by_place[EXIT, 1]["loops"])


def _cells(row: Mapping[str, Any]) -> list[str]:
    full = row["arm"] == BASELINE
    kept = (f"{name.removeprefix('accepted_')} {share:.0%}" for name, share in row.items() if name.startswith("accepted_"))
    return [
        str(row["batch"]),
        row["title"],
        "1" if full else f"{row['ratio_median']:.2f} ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})",
        "1" if full else f"{row['ratio_total']:.2f}",
        f"{row['tokens_per_s']:.0f}",
        f"{row['loops']:.2f}" if row["arm"] in (BASELINE, EXIT) else "",  # drafts are final after all loops
        f"{row['launched']:.2f}",
        " ".join(kept),
        str(row["differing_tokens"]),
    ]


def add_certificate(report: Report, bundle: Path, documents: int, windows: int) -> None:
    """What `exit` does behind held-out text, and how often its certificate is violated."""
    texts = [prompt.ids for prompt in held_out_prompts(documents, PROMPT_TOKENS + READ_TOKENS, "library")]
    read = read_held_out(bundle, texts)
    report.add(f"looped_{EXIT}_disagreement_pct", 100 * read["forced"])
    share = f"{read['forced']:.2%} ± {read['interval']:.2%}"
    said = f"`exit` certified at {PERCENT}% chooses another token than `full` at {share} of {documents * READ_TOKENS:,} places "
    said += f"of {documents} held-out documents."
    if windows:
        model = read_manifest(bundle).model
        layers = model.num_layers // model.loops
        found = violations([layers * loop for loop in range(1, model.loops)], windows)
        report.add("looped_violations_pct", 100 * found.violations)
        said += f" Chosen anew on random quarters of the documents, certificates are violated in {found.violations:.1%} of "
        said += f"cases (at most 5% may be); {found.exit_share:.0%} of the tokens leave early."
    report.statement("Does the certificate hold?", said)


def add_export(report: Report, rows: Sequence[Mapping[str, Any]]) -> None:
    cells = [
        [str(row["loops"]), f"{row['source'] / GB:.2f}", f"{row['seconds']:.0f}", f"{row['anonymous'] / GIB:.2f}",
         f"{row['bundle'] / GB:.3f}"]
        for row in rows
    ]  # fmt: skip
    headings = ["loops", "model, GB", "seconds", "memory, GiB", "bundle, GB"]
    caption = "Random weights in Ouro-1.4B's shape, bf16 to int4. Memory of the process alone, without pages of mapped files."
    report.table("Export of a looped model", headings, cells, caption)
    looped, once = rows
    report.add("looped_export_s", looped["seconds"])
    report.add("looped_export_gib", looped["anonymous"] / GIB)
    report.add("looped_weights_ratio", looped["bundle"] / once["bundle"])


def main(
    prompts: Annotated[int, typer.Option(min=8, help="Held-out prompts of each batch size.")] = 64,
    windows: Annotated[int, typer.Option(min=0, help="Windows of 256 tokens for the certificates; 0: none.")] = 400,
    export: Annotated[bool, typer.Option(help="Also export a random Ouro-1.4B.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_PROMPTS} prompts, no certificates, no export.")] = False,
    bundles: Annotated[Path | None, typer.Option(help="Take bundle_1 and bundle_5 from this folder; do not calibrate.")] = None,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    folder: Annotated[Path, typer.Option(help="Where the model to export lies until it ends.")] = Path("build"),
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Measure looped models on this machine's CPU."""
    if quick:
        prompts, windows, export = QUICK_PROMPTS, 0, False
    report = Report("looped", prompts=prompts, new_tokens=NEW_TOKENS, windows=windows, export=export)
    made = {p: bundles / f"bundle_{p}" for p in (1, PERCENT)} if bundles is not None else calibrated_bundles(MODEL, cache)
    ids = [prompt.ids for prompt in held_out_prompts(prompts, PROMPT_TOKENS, "library")]
    report.rows += [row for batch in (1, 8) for row in run_batch(made, batch, ids, NEW_TOKENS)]
    add_speeds(report, report.rows, prompts)
    add_certificate(report, made[PERCENT], 12 if quick else 48, windows)
    if export:
        exported = export_rows(OURO_1B, folder)
        report.settings["export"] = [{**row, "printed": row["printed"].splitlines()} for row in exported]
        add_export(report, exported)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
