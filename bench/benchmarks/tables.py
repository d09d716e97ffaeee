"""Write README's tables and the documentation's from the dated runs in docs/results/, so that no measured number is typed.

python -m benchmarks.tables            # rewrite README.md and the pages of docs/ that hold tables
python -m benchmarks.tables --check    # exit 1 when one of them is not what the results say
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from tide_bench.tables import Table, where

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
START, END = "<!-- tables: benchmarks/tables -->", "<!-- /tables -->"

# Page → the benchmarks whose newest runs it shows, in order.
PAGES = {
    "README.md": ("quantised_decode",),
    "docs/measured.md": (
        *("integer_products", "integer_products_avx2"),
        *("quantised_decode", "quantised_decode_avx2", "export_scale"),
    ),
    "docs/measured-policies.md": ("tasks", "tasks_avx2", "tasks_second", "lm_eval_policies"),
    "docs/depth.md": ("looped", "drafters", "tasks_calibrated", "tasks_calibrated_int4"),
    "docs/certificate.md": ("certificate",),
    "docs/serving.md": ("serve_load", "agent_session", "restart", "model_swap", "serve_hostile"),
    "docs/targets.md": ("gpu_kit",),
}
BRIEF = ("README.md",)  # pages that show the first table of a run and no other
# Benchmark → ends of the arms that brief pages show of it; of others they show all.
SHOWN = {
    "quantised_decode": (
        "int4, bits same", "int4, exact", "source, bits same", "source, exact", "llama.cpp", "onnxruntime-genai int4",
    ),
}  # fmt: skip


def latest(benchmark: str) -> dict[str, Any] | None:
    """The newest run of a benchmark; files are named DATE-benchmark.json."""
    files = sorted(RESULTS.glob(f"*-{benchmark}.json"))
    return json.loads(files[-1].read_text(encoding="utf-8")) if files else None


def run_tables(benchmark: str, brief: bool) -> list[str]:
    """The tables of the newest run as Markdown; none while there is no run."""
    run = latest(benchmark)
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
