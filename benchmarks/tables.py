"""Write README's tables and the documentation's from the dated runs in docs/results/, so that no measured number is typed.

python -m benchmarks.tables            # rewrite README.md and the pages of docs/ that hold tables
python -m benchmarks.tables --check    # exit 1 when one of them is not what the results say
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from tide_bench.tables import Table, where

from benchmarks.gpu.kit_report import gpu_kit_not_run, gpu_kit_table

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
START, END = "<!-- tables: benchmarks/tables -->", "<!-- /tables -->"

# Page → the benchmarks whose newest runs it shows, in order.
PAGES = {
    "README.md": ("quantised_decode",),
    "docs/measured.md": (
        "quantised_decode", "quantised_decode_avx2", "engine_load", "engine_soak",
    ),
    "docs/measured-policies.md": (
        "tasks", "tasks_avx2", "tasks_second", "adversarial_depth", "lm_eval_policies",
        "exact_identity", "exact_identity_low_bits",
    ),
    "docs/depth.md": ("looped", "drafters", "tasks_calibrated", "tasks_calibrated_int4", "predicted_speedup"),
    "docs/measured-runtime.md": (
        "export_scale", "large_model", "hybrids", "long_chat",
    ),
    "docs/certificate.md": (
        "certificate", "certificate_joint", "policy_quality", "calibration_quality", "capture_memory", "capture_memory_demo",
    ),
    "docs/serving.md": (
        "sizing", "serve_load", "agent_session", "restart", "model_swap", "lora", "structured_outputs", "http_loglik",
        "serve_hostile",
    ),
    "docs/targets.md": ("gpu_kit",),
}  # fmt: skip
BRIEF = ("README.md",)  # pages that show the first table of a run and no other
# Benchmark → ends of the arms that brief pages show of it; of others they show all.
SHOWN = {
    "quantised_decode": (
        "int4, bits same", "int4, exact", "source, bits same", "source, exact", "llama.cpp", "onnxruntime-genai int4",
    ),
}  # fmt: skip
# Runs on a GPU have no tables of their own, and a page says when there is none: (run → Markdown, Markdown without a run).
GPU: dict[str, tuple[Callable[[dict[str, Any]], str], Callable[[], str]]] = {
    "gpu_kit": (gpu_kit_table, gpu_kit_not_run),
}


def latest(benchmark: str) -> dict[str, Any] | None:
    """The newest run of a benchmark; files are named DATE-benchmark.json."""
    files = sorted(RESULTS.glob(f"*-{benchmark}.json"))
    return json.loads(files[-1].read_text(encoding="utf-8")) if files else None


def run_tables(benchmark: str, brief: bool) -> list[str]:
    """The tables of the newest run as Markdown; none while there is no run."""
    run = latest(benchmark)
    if benchmark in GPU:
        drawn, not_run = GPU[benchmark]
        return [drawn(run) if run is not None else not_run()]
    tables = [Table(**kept) for kept in run["tables"]] if run is not None else []
    if brief:
        tables = tables[:1]
        if shown := SHOWN.get(benchmark):
            tables = [replace(one, rows=[row for row in one.rows if row[0].endswith(shown)], notes=()) for one in tables]
    return [table.markdown(where(run) if run and not number else None) for number, table in enumerate(tables)]


def with_tables(page: str, text: str) -> str:
    """``text`` of ``page`` with everything between the markers written anew."""
    tables = [table for name in PAGES[page] for table in run_tables(name, page in BRIEF)]
    body = "\n\n".join(tables) or f"No run of {', '.join(f'`benchmarks.{name}`' for name in PAGES[page])} is published yet."
    before, rest = text.split(START, 1)
    _, after = rest.split(END, 1)
    return f"{before}{START}\n{body}\n{END}{after}"


def main(
    check: Annotated[bool, typer.Option("--check", help="Fail when a page is out of date.")] = False,
) -> None:
    """Regenerate the tables of README and the documentation."""
    for page in PAGES:
        path = ROOT / page
        old = path.read_text(encoding="utf-8")
        new = with_tables(page, old)
        if check and new != old:
            print(f"{page} does not show the newest results; run: make tables", file=sys.stderr)
            raise typer.Exit(1)
        if not check:
            path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
