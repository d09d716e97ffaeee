"""Write README's tables from the dated runs in docs/results/: nobody types a measured number.

python -m benchmarks.tables            # rewrite README.md
python -m benchmarks.tables --check    # exit 1 when README.md is not what the results say
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.arms import ARMS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
START, END = "<!-- tables: benchmarks/tables.py -->", "<!-- /tables -->"


def latest(benchmark: str) -> dict[str, Any] | None:
    """The newest run of a benchmark; files are named DATE-benchmark.json."""
    files = sorted(RESULTS.glob(f"*-{benchmark}.json"))
    return json.loads(files[-1].read_text(encoding="utf-8")) if files else None


def decode_table(run: dict[str, Any]) -> str:
    lines = [
        f"**Decode speed**, fp32, greedy ({_where(run)}). TIDE ×: that arm's time over TIDE's, "
        "measured in turns (below 1: that arm is faster).",
        "",
        "| model | batch | arm | ms per step | tokens/s | first token | TIDE × | tokens as HF eager |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in run["rows"]:
        cells = [row["model"], str(row["batch"]), ARMS[row["arm"]].title]
        if "decode_ms_per_token" in row:
            ratio, agreement = row["full_is_faster_by"], row["agreement"]
            cells += [
                f"{row['decode_ms_per_token']:.2f}",
                f"{row['tokens_per_s']:.1f}",
                f"{row['first_token_ms']:.0f} ms",
                "" if ratio is None else f"{ratio:.2f}",
                "" if agreement is None else f"{agreement:.0%}",
            ]
        else:
            cells += ["could not run", "", "", "", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tax_table(run: dict[str, Any]) -> str:
    counts = sorted({int(m[1]) for name in run["results"] if (m := re.search(r"tax_(\d+)_s", name))})
    lines = [
        f"**What cutting costs**: one decode step through N segments over the same step of the unsplit graph ({_where(run)}).",
        "",
        "| model | S | unsplit ms | " + " | ".join(f"{n} segments" for n in counts) + " |",
        "|---|---|---|" + "---|" * len(counts),
    ]
    for prefix, title in (("", "12 layers × 512, random"), ("demo_", "demo model")):
        for seq in (1, 4):
            name = f"{prefix}segment_tax"
            if f"{name}_unsplit_ms_s{seq}" not in run["results"]:
                continue
            ratios = [f"{run['results'][f'{name}_{n}_s{seq}']:.3f}" for n in counts]
            lines.append(f"| {title} | {seq} | {run['results'][f'{name}_unsplit_ms_s{seq}']:.2f} | " + " | ".join(ratios) + " |")
    return "\n".join(lines)


def export_line(run: dict[str, Any]) -> str:
    results = run["results"]
    seconds, peak = (next(v for name, v in results.items() if name.endswith(end)) for end in ("_seconds", "_peak_gib"))
    dtype = run["settings"]["dtype"]
    return f"**Export** of the 1.1B model in {dtype}, verified: {seconds:.0f} s, {peak:.1f} GiB peak memory ({_where(run)})."


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "decode_cpu": decode_table,
    "decode_cpu_1b": decode_table,
    "segment_tax": tax_table,
    "export_1b": export_line,
}


def _where(run: dict[str, Any]) -> str:
    machine = run["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("onnxruntime", "torch"))
    return f"{run['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, {versions}"


def with_tables(readme: str) -> str:
    """``readme`` with everything between the markers written anew."""
    runs = {name: latest(name) for name in TABLES}
    body = "\n\n".join(table(run) for name, table in TABLES.items() if (run := runs[name]) is not None)
    before, rest = readme.split(START, 1)
    _, after = rest.split(END, 1)
    return f"{before}{START}\n{body}\n{END}{after}"


def main(
    check: Annotated[bool, typer.Option("--check", help="Fail when README.md is out of date.")] = False,
) -> None:
    """Regenerate README's tables."""
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    new = with_tables(old)
    if check and new != old:
        print("README.md does not show the newest results; run: make tables", file=sys.stderr)
        raise typer.Exit(1)
    if not check:
        path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
