"""Tables from runs of tide-bench: its own, and one on the predecessor's terms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tide_bench.table import CAPTION, HEADINGS, cells, notes, places

from benchmarks.markdown import table

Run = Mapping[str, Any]
Row = Mapping[str, Any]

# github.com/RightNow-AI/TIDE and arXiv 2603.21365: change against HF eager on an A100-SXM4-40GB, bf16.
PUBLISHED = (
    ("prefill latency", "DeepSeek R1 Distill 8B", 1, -0.072),
    ("throughput", "DeepSeek R1 Distill 8B", 1, 0.066),
    ("throughput", "Qwen3 8B", 8, 0.081),
    ("throughput", "DeepSeek R1 Distill 8B", 8, -0.163),
)


def bench_table(run: Run, where: str, model: str | None = None) -> str:
    """A table for every place of one run. ``where``: date and machine. ``model``: what to call it, if not by its folder."""
    settings, mode = run["settings"], run["settings"]["mode"]
    name, tokens = model or settings["model"], settings["new_tokens"]
    lines = [f"**tide-bench, {mode}**: {name}, {tokens} new tokens per sequence ({where}). {CAPTION[0].upper()}{CAPTION[1:]}."]
    for place, rows in places(run["rows"]).items():
        lines += ["", f"{place}:", "", *table(HEADINGS[mode], (cells(mode, row) for row in rows))]
    remarks = notes(run["rows"])
    return "\n".join([*lines, "", *(f"- {remark}" for remark in remarks)]).rstrip()


# README shows these arms and columns of the batch-1 decode run; docs/measured.md has the whole run.
SUMMARY_ARMS = ("exact", "full", "unsplit", "genai", "eager")
SUMMARY_COLUMNS = ("arm", "ms per token (p10–p90)", "tokens/s", "first token", "× unsplit (95%)", "layers/token", "as `full`")


def summary_table(run: Run, where: str) -> str:
    """README's one table: the arms that matter at batch 1, in the order of `SUMMARY_ARMS`."""
    settings = run["settings"]
    indices = [HEADINGS["decode"].index(column) for column in SUMMARY_COLUMNS]
    prompt = settings["prompt_tokens"][0]
    measured = (row for row in run["rows"] if (row.get("batch"), row.get("prompt_tokens")) == (1, prompt))
    rows = {row["arm"]: cells("decode", row) for row in measured}
    title = (
        f"Decoding with the demo model `{settings['model']}` at batch 1, {settings['new_tokens']} greedy tokens after "
        f"{prompt} prompt tokens ({where}). × unsplit: speed over the same graph without cuts, median of "
        "neighbouring turns; as `full`: share of tokens that equal `full`'s up to the first difference."
    )
    shown = ([rows[arm][index] for index in indices] for arm in SUMMARY_ARMS if arm in rows)
    return "\n".join([title, "", *table(SUMMARY_COLUMNS, shown)])


def predecessor_table(decode: Run, prefill: Run | None, where: str) -> str:
    """What the predecessor publishes, beside the same quantities here: other model, other machine, same question."""
    rows = []
    for quantity, model, batch, change in PUBLISHED:
        run = prefill if quantity == "prefill latency" else decode
        if run is not None:
            figures = [_change(run["rows"], arm, batch, quantity) for arm in ("predecessor", "full", "exact", "unsplit")]
            rows.append([quantity, str(batch), f"{change:+.1%} ({model})", *figures])
    headings = ["quantity", "batch", "published by the predecessor", "predecessor here", "TIDE full", "TIDE exact", "unsplit"]
    return "\n".join(
        [
            "**On the predecessor's terms**: change against HF eager. Left: what tide-inference publishes (A100-SXM4-40GB, "
            f"bf16); right: `{decode['settings']['model']}` on the machine at hand ({where}). The left is another model on "
            "another machine; the columns on the right are one experiment.",
            "",
            *table(headings, rows),
        ]
    )


def _change(rows: Sequence[Row], arm: str, batch: int, quantity: str) -> str:
    """Less latency, or more throughput, than eager; empty where it was not measured."""
    row = next((r for r in rows if (r["arm"], r.get("batch")) == (arm, batch) and "vs_eager" in r), None)
    if row is None:
        return ""
    change = 1 / row["vs_eager"] - 1 if quantity == "prefill latency" else row["vs_eager"] - 1
    return f"{change:+.1%}"
