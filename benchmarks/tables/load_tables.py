"""Tables of an engine under load: `benchmarks.engine_load` and `engine_soak`."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import table
from benchmarks.serving.latency import PERCENTILES


def closed_table(run: dict[str, Any], where: str) -> str:
    """Clients that send their next request after an answer."""
    rows = []
    for row in (row for row in run["rows"] if row.get("part") == "closed"):
        figures = [f"{row['tokens_per_s']:.0f}", f"{row['ttft_ms_p50']:.0f} ms", f"{row['itl_ms_p50']:.1f} ms"]
        rows.append([str(row["clients"]), row["title"], row["weights"], *figures])
    title = (
        f"**One engine, many callers**: SmolLM2-135M-Instruct, clients that send their next request after an answer, 64-token "
        f"prompts, 64 new tokens ({where}). Medians."
    )
    return "\n".join([title, "", *table(["clients", "arm", "weights", "tokens/s", "first token", "between tokens"], rows)])


def poisson_table(run: dict[str, Any], where: str) -> str:
    """Requests that arrive at random."""
    rows = []
    for row in (row for row in run["rows"] if row.get("part") == "poisson"):
        latencies = [" / ".join(f"{row[f'{kind}_ms_p{q}']:.0f}" for q in PERCENTILES) for kind in ("ttft", "itl")]
        load = [f"{row['share']}%", f"{row['own_load']:.0%}", f"{row['rate']:.2f}"]
        rows.append([*load, row["title"], row["weights"], *latencies, f"{row['tokens_per_s']:.0f}"])
    title = (
        f"**Requests that arrive at random** (Poisson), prompts of 16 to 900 tokens, 16 to 96 new tokens ({where}). Load: the "
        "rate over TIDE's capacity, and over the arm's own. Percentiles 50 / 95 / 99 in ms."
    )
    headings = ["load", "own load", "requests/s", "arm", "weights", "first token", "between tokens", "tokens/s"]
    return "\n".join([title, "", *table(headings, rows)])


def load_line(run: dict[str, Any], where: str) -> str:
    """What `engine_load` measures besides."""
    results = run["results"]
    return (
        f"**Prompts, prefixes and overhead** ({where}): eight 64-token prompts have their first tokens "
        f"{results['prefill8_vs_genai']:.2f} times as fast as in onnxruntime-genai; behind a cached prefix of 900 tokens the "
        f"first token takes {results['warm_over_cold']:.1%} of the time; Python takes {results['python_per_step_pct']:.1f}% of a "
        f"step of 8 sequences (int4); an idle engine {results['idle_cpu_pct']:.3f}% of a core."
    )


def soak_line(run: dict[str, Any], where: str) -> str:
    results, settings = run["results"], run["settings"]
    return (
        f"**Traffic changes no text**: {settings['requests']:,} requests of {settings['callers']} callers to two engines of a "
        f"tiny random model (`full`, `exact`) with cancellations, deadlines, priorities and shared prefixes; "
        f"{results['preemptions']:.0f} preemptions; {results['wrong_texts']:.0f} texts differ from the text alone, "
        f"{results['lost']:.0f} requests lost, {results['leaked_kv_bytes']:.0f} bytes leaked, memory "
        f"{results['memory_growth_pct']:+.1f}% ({where})."
    )
