"""Write the tables and figures of README and docs/ from the dated runs in docs/results/, so that no measured number is typed.

python -m benchmarks.tables            # rewrite the pages that have markers
python -m benchmarks.tables --check    # exit 1 when one of them is not what the results say

A page says where they stand, and of which benchmarks: `<!-- tables: serve_load restart -->` … `<!-- /tables -->` holds all tables
of their newest runs, `<!-- brief: … -->` the rows and columns of `BRIEF`, `<!-- figures: README -->` the text of `FIGURES`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from tide_bench.tables import Table, where

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
MARKED = re.compile(r"<!-- (tables|brief|figures): ([\w ]+) -->\n(.*?)<!-- /\1 -->", re.S)

# Benchmark → title, caption, arms and columns of its first table where a page is brief: what users choose between.
BRIEF = {
    "integer_products_amd": (
        "SmolLM2-135M-Instruct without drafts",
        "Tokens per second of one request and of eight together; milliseconds until the first token of a prompt of 512 tokens. "
        "`w8a8` is what an export chooses by itself; *build* is what ran; GGML_NATIVE is compiled for this machine. "
        "Medians of rounds, all arms in turn.",
        ("TIDE w8a8", "TIDE int4", "llama.cpp, the file", "onnxruntime-genai int4", "OpenVINO GenAI, Q8_0"),
        ("arm", "batch 1, tokens/s", "batch 8, tokens/s", "first token of 512, ms", "build"),
    ),
}
# Page → text with figures of newest runs, in the syntax of str.format: {benchmark[result]}.
FIGURES = {
    "README": """\
- **One request at a time, Qwen2.5-Coder-0.5B: {tasks_05b[w8a8_auto_vs_llamacpp]:.2f} times llama.cpp's speed** (compiled \
here; {tasks_05b[w8a8_auto_vs_llamacpp_drafts]:.2f} with its own
  drafts) and {tasks_05b[w8a8_auto_vs_genai]:.2f} times onnxruntime-genai's over ten kinds of work; \
{tasks_05b[w8a8_auto_vs_llamacpp_solved]:.2f} and {tasks_05b[w8a8_auto_vs_genai_solved]:.2f} on solved tasks, \
{tasks_05b[w8a8_auto_vs_llamacpp_worst_kind]:.2f} and {tasks_05b[w8a8_auto_vs_genai_worst_kind]:.2f} in the worst kind.
- **Eight requests together, SmolLM2: {integer_products_amd[w8a8_b8_vs_llamacpp]:.2f} times llama.cpp's tokens per second**, \
{integer_products_amd[w8a8_b8_vs_genai]:.2f} times onnxruntime-genai's.
- **The same request gets the same text**: {certainty[tide_distinct]:.0f} text, asked {certainty[settings][requests]} times \
alone, in crowds of 32, from caches,
  after restarts and preemptions; up to {certainty[llamacpp_distinct]:.0f} texts of llama.cpp's server.
- **A coding agent's session of 20 turns, the 0.5B: {agent_session_05b[agent_session_s_messages_tide]:.0f} s, \
{agent_session_05b[agent_session_s_messages_llamacpp]:.0f} s with llama.cpp's server**, whose answers are longer.
- **A chat of 2,000 tokens after a restart: first token in {restart[first_token_ms_restart]:.0f} ms**, \
{restart[first_token_ms_cold]:.0f} ms if it is computed anew.
- **Where others are faster:** a single step without drafts has {integer_products_amd[b1_vs_best_peer]:.2f} times the speed of \
the fastest engine, a prompt of
  512 tokens {integer_products_amd[prefill512_vs_best_peer]:.2f} times: see the table below.

{integer_products_amd[machine][cpu]}, {integer_products_amd[machine][instructions]}, {integer_products_amd[machine][cores]} \
cores; {tasks_05b[date]:.10}.""",
}


class Runs(dict[str, dict[str, Any]]):
    """Benchmark → its newest run with its results, read when it is named."""

    def __missing__(self, benchmark: str) -> dict[str, Any]:
        run = latest(benchmark)
        if run is None:
            raise KeyError(f"no run of benchmarks.{benchmark} is published")
        return self.setdefault(benchmark, run | run["results"])


def latest(benchmark: str) -> dict[str, Any] | None:
    """The newest run of a benchmark; files are named DATE-benchmark.json."""
    files = sorted(RESULTS.glob(f"*-{benchmark}.json"))
    return json.loads(files[-1].read_text(encoding="utf-8")) if files else None


def run_tables(benchmark: str, brief: bool) -> list[str]:
    """The tables of the newest run as Markdown; a sentence while there is no run."""
    run = latest(benchmark)
    if run is None:
        return [f"No run of `benchmarks.{benchmark}` is published yet."]
    tables = [Table(**kept) for kept in run["tables"]]
    if brief:
        title, caption, arms, columns = BRIEF[benchmark]
        first = tables[0]
        cells = [dict(zip(first.headings, row, strict=True)) for row in first.rows]
        rows = [[row[column] for column in columns] for row in cells if row[columns[0]].endswith(arms)]
        tables = [Table(title, columns, rows, caption)]
    return [table.markdown(where(run) if not number else None) for number, table in enumerate(tables)]


def with_tables(text: str) -> str:
    """``text`` of a page with everything between its markers written anew."""

    def written(match: re.Match[str]) -> str:
        kind = match[1]
        names = match[2].split()
        if kind == "figures":
            parts = [FIGURES[name].format_map(Runs()) for name in names]
        else:
            parts = [table for name in names for table in run_tables(name, kind == "brief")]
        body = "\n\n".join(parts)
        return f"<!-- {kind}: {match[2]} -->\n{body}\n<!-- /{kind} -->"

    return MARKED.sub(written, text)


def main(
    check: Annotated[bool, typer.Option("--check", help="Fail when a page is out of date.")] = False,
) -> None:
    """Regenerate the tables and figures of README and the documentation."""
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        old = path.read_text(encoding="utf-8")
        new = with_tables(old)
        if check and new != old:
            print(f"{path.relative_to(ROOT)} does not show the newest results; run: make tables", file=sys.stderr)
            raise typer.Exit(1)
        if not check and new != old:
            path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
