"""Tables of `tide-serve`: benchmarks serve_load, structured_outputs, http_loglik, serve_hostile and ray_failover."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import table
from benchmarks.serving.latency import PERCENTILES

ARMS = {
    "serve": "tide-serve, `full`",
    "serve_auto": "tide-serve, `auto`",
    "engine": "bare engine, callers in its process",
    "llamacpp": "llama.cpp server",
}


def closed_table(run: dict[str, Any], where: str) -> str:
    """Clients that send their next request after an answer."""
    results, rows = run["results"], []
    for row in (row for row in run["rows"] if row["part"] == "closed"):
        first = " / ".join(f"{row[f'ttft_ms_p{q}']:.0f}" for q in (50, 95))
        between = " / ".join(f"{row[f'itl_ms_p{q}']:.1f}" for q in PERCENTILES)
        rows.append([str(row["clients"]), ARMS[row["arm"]], f"{row['tokens_per_s']:.0f}", first, between])
    title = (
        f"**tide-serve and llama.cpp's server**: SmolLM2-135M-Instruct, int4 and Q4_1, clients that send their next request "
        f"after an answer, 64-token prompts, 64 new tokens, greedy ({where}). Percentiles in ms, medians of rounds."
    )
    headings = ["clients", "arm", "tokens/s", "first token, p50 / p95", "between tokens, p50 / p95 / p99"]
    clients = [n for n in (1, 8, 32) if f"serve_vs_llamacpp_{n}" in results]
    ratios = ", ".join(f"{results[f'serve_vs_llamacpp_{n}']:.2f}x at {n}" for n in clients)
    note = f"tide-serve over llama.cpp, paired by round: {ratios} clients. HTTP costs {results['http_overhead_pct']:.1f}% at 8."
    return "\n".join([title, "", *table(headings, rows), "", note])


def open_table(run: dict[str, Any], where: str) -> str:
    """Requests that arrive at random."""
    rows = []
    for row in (row for row in run["rows"] if row["part"] == "open"):
        latencies = [" / ".join(f"{row[f'{kind}_ms_p{q}']:.0f}" for q in PERCENTILES) for kind in ("ttft", "itl")]
        rows.append([f"{row['share']}%", f"{row['rate']:.2f}", ARMS[row["arm"]], *latencies])
    if not rows:
        return ""
    title = (
        f"**Requests that arrive at random** (Poisson) over HTTP, prompts of 16 to 900 tokens, 16 to 96 new tokens ({where}). "
        "Load: the rate over tide-serve's capacity. Percentiles 50 / 95 / 99 in ms."
    )
    return "\n".join([title, "", *table(["load", "requests/s", "arm", "first token", "between tokens"], rows)])


def soak_line(run: dict[str, Any], where: str) -> str:
    results = run["results"]
    if "soak_requests" not in results:
        return ""
    return (
        f"**Clients that hang up**: {results['soak_requests']:.0f} requests over HTTP, {results['soak_hung_up']:.0f} of whose "
        f"clients hung up in the middle: {results['soak_wrong']:.0f} wrong texts, {results['soak_leaked']:.0f} requests left in "
        f"the engine ({where})."
    )


def forms_table(run: dict[str, Any], where: str) -> str:
    """Fixed forms, with and without the tokens that the grammar forces."""
    rows = []
    for row in (row for row in run["rows"] if "form" in row):
        forced = row["drafted"].get("grammar", 0) / row["tokens"]
        speeds = [f"{row[name]:.2f}x" for name in ("over_without", "over_full")]
        rows.append(
            [
                row.get("title", row["weights"]),
                row["form"],
                str(row["tokens"]),
                f"{forced:.0%}",
                *speeds,
                f"{row['mask_share']:.1%}",
            ]
        )
    title = (
        f"**Forced tokens are free drafts**: SmolLM2-135M-Instruct, policy `exact`, fixed JSON schemas, greedy, one at a time "
        f"({where}). Drafted: share of the tokens that the schema forces. Mask: all that the grammar does, of the decode time. "
        f"Tokens that differ between the arms: {run['results']['differing_tokens']:.0f}."
    )
    headings = ["weights", "schema", "tokens", "drafted", "over `exact` without them", "over `full`", "mask"]
    return "\n".join([title, "", *table(headings, rows)])


def validity_line(run: dict[str, Any], where: str) -> str:
    results, settings = run["results"], run["settings"]
    return (
        f"**Valid outputs**: {settings['schemas']} JSON schemas at temperature 1: {results['valid_outputs']:.0f} outputs valid, "
        f"{results['invalid_outputs']:.0f} invalid, {results['cut_outputs']:.0f} cut by the token limit, "
        f"{results['refused_outputs']:.0f} schemas refused ({where})."
    )


def loglik_line(run: dict[str, Any], where: str) -> str:
    results = run["results"]
    return (
        f"**lm-evaluation-harness over HTTP** (`local-completions`): {results['log_likelihoods']:.0f} log-likelihoods differ "
        f"from those in process by {results['http_loglik_max_diff']:.2g} at most ({where})."
    )


def hostile_line(run: dict[str, Any], where: str) -> str:
    results = run["results"]
    return (
        f"**Hostile clients**: under slow readers, 10 MB bodies, 100,000-character stop lists, nested schemas, invalid UTF-8 and "
        f"1,000 idle connections, in turn, the 95th percentile of other clients' latency was at most "
        f"{results['hostile_worst_p95_ratio']:.2f} times what it is without ({where})."
    )


def failover_line(run: dict[str, Any], where: str) -> str:
    results = run["results"]
    return (
        f"**Ray Serve on one machine**: a replica killed under load: {results['mixed_on_kill']:.0f} answers mixed, "
        f"{results['unanswered_on_kill']:.0f} requests without an answer or an error; a bundle rolled out under load: "
        f"{results['failed_on_update']:.0f} failed requests; a second replica adds {results['second_replica_memory_pct']:.0f}% "
        f"of the weights' memory ({where})."
    )
