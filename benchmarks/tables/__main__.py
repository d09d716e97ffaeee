"""Write README's tables and the documentation's from the dated runs in docs/results/, so that no measured number is typed.

python -m benchmarks.tables            # rewrite README.md and the pages of docs/ that hold tables
python -m benchmarks.tables --check    # exit 1 when one of them is not what the results say
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.gpu.decode_table import decode_cuda_not_run, decode_cuda_table
from benchmarks.gpu.kit.tables import gpu_kit_not_run, gpu_kit_table
from benchmarks.markdown import table
from benchmarks.models.gguf_files import GGUF_MODELS
from benchmarks.tables import calibration_tables, load_tables, serving_tables, task_tables
from benchmarks.tables.bench_tables import bench_table, predecessor_table, summary_table
from benchmarks.tables.policy_table import HEADINGS, cells
from benchmarks.tables.verified_table import verified_table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
START, END = "<!-- tables: benchmarks/tables -->", "<!-- /tables -->"
VERIFIED, VERIFIED_END = "<!-- verified: benchmarks/tables -->", "<!-- /verified -->"


def latest(benchmark: str) -> dict[str, Any] | None:
    """The newest run of a benchmark; files are named DATE-benchmark.json."""
    files = sorted(RESULTS.glob(f"*-{benchmark}.json"))
    return json.loads(files[-1].read_text(encoding="utf-8")) if files else None


def tax_table(run: dict[str, Any]) -> str:
    counts = sorted({int(m[1]) for name in run["results"] if (m := re.search(r"tax_(\d+)_b", name))})
    title = f"**What cutting costs**: decoding through N segments, time over that of the unsplit graph ({_where(run)})."
    rows = []
    for prefix, model in (("", "12 layers × 512, random"), ("demo_", "demo model")):
        for batch in (1, 4):
            name = f"{prefix}segment_tax"
            if f"{name}_unsplit_ms_b{batch}" in run["results"]:
                ratios = [f"{run['results'][f'{name}_{n}_b{batch}']:.3f}" for n in counts]
                rows.append([model, str(batch), f"{run['results'][f'{name}_unsplit_ms_b{batch}']:.2f}", *ratios])
    return "\n".join([title, "", *table(["model", "batch", "unsplit ms", *(f"{n} segments" for n in counts)], rows)])


def export_line(run: dict[str, Any]) -> str:
    results = run["results"]
    seconds, peak = (next(v for name, v in results.items() if name.endswith(end)) for end in ("_seconds", "_peak_gib"))
    dtype = run["settings"]["dtype"]
    return f"**Export** of the 1.1B model in {dtype}, verified: {seconds:.0f} s, {peak:.1f} GiB peak memory ({_where(run)})."


def weights_table(run: dict[str, Any]) -> str:
    rows = (
        [
            row["weights"],
            row["loaded"],
            _figure(row, "load_s", ".2f", "s"),
            *(_figure(row, m, ".0f", "MiB") for m in ("mib", "own_mib")),
        ]
        for row in run["rows"]
    )
    title = (
        f"**Packed weights in the bundle**, {run['settings']['bundle']} model: proportional set size above what the process held "
        f"before, and the part of it that is not shared ({_where(run)})."
    )
    return "\n".join([title, "", *table(["weights", "loaded", "after", "memory", "own"], rows)])


def _figure(row: dict[str, Any], name: str, digits: str, unit: str) -> str:
    return f"{row[name]:{digits}} {unit}" if name in row else ""


def policies_table(run: dict[str, Any]) -> str:
    """Greedy runs of the demo models at batch 1 and at the largest batch; notes below summarise the others."""
    settings, results = run["settings"], run["results"]
    shown = (1, max(settings["batches"]))
    rows = (
        [row["model"], str(row["batch"]), *cells(row)]
        for row in run["rows"]
        if row["model"] != "random" and not row["temperature"] and row["batch"] in shown
    )
    lines = [
        f"**Depth policies**, fp32, greedy, {settings['prompts']} held-out prompts, {settings['new_tokens']} new tokens per "
        f"sequence ({_where(run)}). Ratios are to policy `full` on the same weights, in neighbouring turns (above 1: faster): "
        "median over groups of prompts with its 95% interval, and of the total time. Disagreement with `full`: per token up to "
        "the first difference (share of all tokens).",
        "",
        *table(["model", "batch", *HEADINGS], rows),
    ]
    sampled = [
        f"{name.split('_')[2]} {value:.2f}" for name, value in results.items() if re.match(r"exact_both_(?!r).*_b1_t08", name)
    ]
    notes = [f"At temperature 0.8, batch 1, `exact` with both drafters: {', '.join(sampled)}."] if sampled else []
    if "worst_case" in results:
        random = " (random weights with a wrong calibration among them)" if "random" in settings["models"] else ""
        notes.append(
            f"The slowest policy of all models{random}, batch sizes and temperatures: {results['worst_case']:.2f} "
            f"({results['worst_case_low']:.2f}–{results['worst_case_high']:.2f})."
        )
    return "\n".join([*lines, "", *notes])


def identity_line(run: dict[str, Any]) -> str:
    """Tokens of `exact` that are not `full`'s, greedy or sampled."""
    results, settings = run["results"], run["settings"]
    temperature = settings.get("temperature", 0)
    how = f"at temperature {temperature:g}, top-p {settings['top_p']:g}, each with a seed" if temperature else "greedy"
    eager = [value for name, value in results.items() if re.search(r"(^|_)identical_to_eager_pct", name) and "full_" not in name]
    odd = f"{results['unexplained_differences']:.0f} texts differ without a near tie"
    held = f"; {min(eager):.3f}% are HF eager's, {odd}" if eager else ""
    drafted = sum(value for name, value in results.items() if "drafted_tokens" in name)
    shares = [value for name, value in results.items() if re.search(r"(^|_)identical_pct", name)]
    differing = sum(round((1 - share / 100) * settings["prompts"] * settings["tokens"]) for share in shares)
    return (
        f"**`exact` gives the model's tokens**: {settings['models'].replace(',', ', ')}, {settings['prompts']} prompts × "
        f"{settings['tokens']} tokens, {how}, batch {settings['batch'].replace(',', ' and ')}: {differing} "
        f"tokens of `exact` differ from `full`'s{f', with {drafted:,.0f} drafts' if drafted else ''}{held} ({_where(run)})."
    )


def quantised_table(run: dict[str, Any]) -> str:
    """Every place of `benchmarks.quantised_decode`."""
    places = list(dict.fromkeys(row["place"] for row in run["rows"] if "title" in row))
    return "\n\n".join(_quantised(run, place) for place in places)


def quantised_summary(run: dict[str, Any]) -> str:
    """One sequence only, for README."""
    return _quantised(run, "b1")


def _quantised(run: dict[str, Any], place: str) -> str:
    """The arms at one place, and how much faster TIDE's source weights are than each."""
    what = (
        f"prompt of {place.removeprefix('prefill_')} tokens"
        if place.startswith("prefill")
        else f"batch {place.removeprefix('b')}"
    )
    instructions = ", ".join(re.findall(r"(\w+) = 1", run["settings"]["llamacpp"]))
    title = (
        f"**{GGUF_MODELS[run['settings']['model']].title}, {what}** ({_where(run)}). TIDE source: the file's own blocks;"
        " exact drafts by prompt lookup, so its speed depends on how much the text repeats."
        f" The wheel of llama.cpp uses {instructions}."
    )
    headings = ["arm", "tokens/s", "ms per token (p10–p90)", "first token", "memory", "load and first token"]
    rows = []
    for row in (row for row in run["rows"] if row["place"] == place and "title" in row):
        spread = [f"{row[f'ms_per_token{end}']:.1f}" for end in ("", "_p10", "_p90")] if "ms_per_token" in row else []
        rows.append([
            row["title"],
            f"{row['tokens_per_s']:.0f}" if "tokens_per_s" in row else "" if "rounds" in row else "could not run",
            f"{spread[0]} ({spread[1]}–{spread[2]})" if spread else "",
            f"{row['first_token_ms']:.0f} ms" if "first_token_ms" in row else "",
            f"{row['peak_mib']:.0f} MiB" if "peak_mib" in row else "",
            f"{row['load_s']:.2f} s" if "load_s" in row else "",
        ])  # fmt: skip
    return "\n".join([title, "", *table(headings, rows)])


def on_predecessors_terms(run: dict[str, Any]) -> str:
    return predecessor_table(run, latest("tide_bench_prefill"), _where(run))


def kv_table(run: dict[str, Any]) -> str:
    """Both caches at every place of `benchmarks.quantised_kv`, and int8 over fp32."""
    results = run["results"]
    sizes = " and ".join(f"{results[f'{kv}_bytes_per_token']:,.0f} ({kv})" for kv in ("fp32", "int8"))
    title = (
        f"**KV cache in fp32 and int8**: SmolLM2-135M-Instruct, Q4_1 GGUF ({_where(run)}). Bytes of cache per token: {sizes}. "
        f"Perplexity on {run['settings']['tokens']} tokens: {results['fp32_ppl']:.2f} and {results['int8_ppl']:.2f} "
        f"({results['int8_ppl_pct']:+.2f}% ± {results['int8_ppl_pct_error']:.2f})."
    )
    rows = []
    for row in run["rows"]:
        batch, prompt = row["place"].removeprefix("b").split("_")
        ratio = f"{results['int8_vs_fp32_' + row['place']]:.2f}" if row["kv"] == "int8" else "1"
        step = f"{row['ms_per_token']:.1f} ({row['ms_per_token_p10']:.1f}–{row['ms_per_token_p90']:.1f})"
        first, memory = f"{row['first_token_ms']:.0f} ms", f"{row['peak_mib']:.0f} MiB"
        rows.append([batch, prompt, row["kv"], f"{row['tokens_per_s']:.0f}", step, ratio, first, memory])
    headings = ["batch", "prompt", "KV cache", "tokens/s", "ms per token (p10–p90)", "× fp32", "first token", "memory"]
    return "\n".join([title, "", *table(headings, rows)])


def _placed(draw: Callable[[dict[str, Any], str], str]) -> Callable[[dict[str, Any]], str]:
    """``draw`` with the run's date and machine."""
    return lambda run: draw(run, _where(run))


# Page → its tables in order: the run that a table is drawn from, and the function that draws it.
PAGES: dict[str, list[tuple[str, Callable[[dict[str, Any]], str]]]] = {
    "README.md": [("quantised_decode", quantised_summary)],
    "docs/measured.md": [
        ("quantised_decode", quantised_table),
        ("quantised_decode_1b", quantised_table),
        ("quantised_kv", kv_table),
        ("engine_load", _placed(load_tables.closed_table)),
        ("engine_load", _placed(load_tables.poisson_table)),
        ("engine_load", _placed(load_tables.load_line)),
        ("engine_soak", _placed(load_tables.soak_line)),
        ("tide_bench", _placed(summary_table)),
        ("tide_bench", _placed(bench_table)),
        ("tide_bench", on_predecessors_terms),
        ("tide_bench_prefill", _placed(bench_table)),
        ("tide_bench_load", _placed(bench_table)),
    ],
    "docs/measured-policies.md": [
        ("tasks", _placed(task_tables.tasks_table)),
        ("tasks_second", _placed(task_tables.second_tasks_line)),
        ("predicted_speedup", _placed(task_tables.predictions_table)),
        ("adversarial_depth", _placed(task_tables.adversarial_table)),
        ("lm_eval_policies", _placed(task_tables.lm_eval_line)),
        ("policies_cpu", policies_table),
        ("exact_identity", identity_line),
        ("exact_identity_low_bits", identity_line),
        ("exact_identity_sampled", identity_line),
    ],
    "docs/measured-runtime.md": [
        ("segment_tax", tax_table),
        ("export_1b", export_line),
        ("shared_weights", weights_table),
    ],
    "docs/certificate.md": [
        ("certificate", _placed(calibration_tables.certificate_table)),
        ("certificate_joint", _placed(calibration_tables.certificate_table)),
        ("policy_quality", _placed(calibration_tables.quality_table)),
        ("calibration_quality", _placed(calibration_tables.heads_and_routers)),
        ("capture_memory", _placed(calibration_tables.memory_line)),
        ("capture_memory_demo", _placed(calibration_tables.memory_line)),
    ],
    "docs/serving.md": [
        ("serve_load", _placed(serving_tables.closed_table)),
        ("serve_load", _placed(serving_tables.open_table)),
        ("serve_load", _placed(serving_tables.soak_line)),
        ("structured_outputs", _placed(serving_tables.forms_table)),
        ("structured_outputs", _placed(serving_tables.validity_line)),
        ("http_loglik", _placed(serving_tables.loglik_line)),
        ("serve_hostile", _placed(serving_tables.hostile_line)),
        ("ray_failover", _placed(serving_tables.failover_line)),
    ],
    "docs/targets.md": [("gpu_kit", gpu_kit_table), ("decode_cuda", decode_cuda_table)],
}
# What a page shows before a benchmark has a run; tables of other benchmarks are left out until then.
NOT_RUN = {"gpu_kit": gpu_kit_not_run, "decode_cuda": decode_cuda_not_run}


def _where(run: dict[str, Any]) -> str:
    machine = run["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("onnxruntime", "torch"))
    instructions = f", {machine['instructions']}" if "instructions" in machine else ""  # runs before 2026-11-27 did not note them
    return f"{run['date'][:10]}, {machine['cpu']}{instructions}, {machine['cores']} cores, {versions}"


def with_tables(page: str, text: str) -> str:
    """``text`` of ``page`` with everything between the markers written anew."""
    body = "\n\n".join(drawn for name, table in PAGES[page] if (drawn := _drawn(name, table)))
    text = _between(text, START, END, body)
    return _between(text, VERIFIED, VERIFIED_END, verified_table(RESULTS)) if VERIFIED in text else text


def _drawn(benchmark: str, table: Callable[[dict[str, Any]], str]) -> str:
    run = latest(benchmark)
    if run is not None:
        return table(run)
    return NOT_RUN[benchmark]() if benchmark in NOT_RUN else ""


def _between(text: str, start: str, end: str, body: str) -> str:
    before, rest = text.split(start, 1)
    _, after = rest.split(end, 1)
    return f"{before}{start}\n{body}\n{end}{after}"


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
