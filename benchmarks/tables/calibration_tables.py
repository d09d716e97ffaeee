"""Tables about what a calibration is worth: exit heads, routers, the certificate, and how `exit` continues held-out text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.markdown import table

Run = Mapping[str, Any]
Row = Mapping[str, Any]

ROUTERS = {"mlp": "MLP", "cosine": "MLP, cosine label"}
METHODS = {"ltt": "certified", "token": "certified by tokens", "naive": "the threshold that just fits"}


def heads_and_routers(run: Run, where: str) -> str:
    """Agreement by depth and kind of head, and areas under agreement-coverage by router."""
    lines = [
        f"**Exit heads and routers** on held-out files, {run['settings']['windows']} windows ({where}). Agreement: how often the "
        "exit's likeliest token is the model's. Area: under agreement against coverage, tokens in the router's order; beside it "
        "the share of tokens that may exit while 1% / 5% of all tokens disagree."
    ]
    for model in dict.fromkeys(row["model"] for row in run["rows"]):
        rows = {kind: [r for r in run["rows"] if (r["model"], r["table"]) == (model, kind)] for kind in ("agreement", "router")}
        kinds = run["settings"]["kinds"]
        shares = ([f"{row['checkpoint']}", *(f"{row[kind]:.1%}" for kind in kinds)] for row in rows["agreement"])
        lines += ["", f"{model}, agreement of exit heads:", "", *table(["layers", *kinds], shares)]
        lines += ["", f"{model}, routers of head `{run['settings']['router_head']}`:", "", *_areas(rows["router"])]
    return "\n".join(lines)


def _areas(rows: Sequence[Row]) -> list[str]:
    routers = list(dict.fromkeys(row["router"] for row in rows))
    cells = {(row["checkpoint"], row["router"]): f"{row['area']:.3f} ({row['exit1']:.0%} / {row['exit5']:.0%})" for row in rows}
    places = dict.fromkeys(row["checkpoint"] for row in rows)
    return table(["layers", *map(_router, routers)], ([str(place), *(cells[place, r] for r in routers)] for place in places))


def _router(name: str) -> str:
    return ROUTERS.get(name, name.replace("_", " ").replace("mlp", "MLP"))


def certificate_table(run: Run, where: str) -> str:
    """How often thresholds of each kind break the promise on other documents."""
    settings, δ = run["settings"], 1 - run["settings"]["confidence"]
    joint = any("reference" in row for row in run["rows"])
    rows = (
        [
            row["data"] + (f" against {row['reference']}" if "reference" in row else ""),
            f"{row['epsilon']:.0%}",
            METHODS[row["arm"]],
            f"{row['violations']:.1%} ± {row['error']:.1%}",
            f"{row['risk']:.2%}",
            f"{row['exit_share']:.1%}",
            f"{row['saved_share']:.1%}",
        ]
        for row in run["rows"]
        if row["by"] == "document"
    )
    return "\n".join(
        [
            f"**Does the certificate hold?** {settings['repeats']} random resplits of held-out documents, δ = {δ:.0%}: a "
            f"violation is a disagreement rate above ε on the other documents ({where})."
            + (f" Against fp32: {settings['joint_repeats']} resplits, weights rounded and exits taken." if joint else ""),
            "",
            *table(["model", "ε", "thresholds", "violations", "mean disagreement", "tokens that exit", "layers saved"], rows),
        ]
    )


def quality_table(run: Run, where: str) -> str:
    """Disagreement after the same text and in texts of their own, and perplexity, by policy."""
    settings = run["settings"]
    rows = (
        [
            row["model"],
            f"`{row.get('title', row['policy']).replace('_', ', ')}`",
            f"{row['certified']:.0%}" if row["certified"] else "",
            f"{row['forced']:.2%} ± {row['interval']:.2%}" if "forced" in row else "",
            f"{row['free']:.2%}",
            f"{row['perplexity']:.3f}" if "perplexity" in row else "",
            f"{row['layers_per_token']:.1f}" if "layers_per_token" in row else "",
        ]
        for row in run["rows"]
    )
    headings = ["model", "policy", "certified", "after the same text", "in its own text", "perplexity", "layers/token"]
    return "\n".join(
        [
            f"**How often `exit` differs**: share of tokens that are not `full`'s, {settings['documents']} held-out documents of "
            f"{settings['tokens']} tokens ({where}). In its own text: per token, up to the first difference.",
            "",
            *table(headings, rows),
        ]
    )


def memory_line(run: Run, where: str) -> str:
    """Peak memory of capturing hidden states."""
    results, shapes = run["results"], {"1b": "1.1B", "demo": "demo"}[run["settings"]["model"]]
    return (
        f"**Capture** of the {shapes} model's hidden states: {results['capture_tokens']:,.0f} tokens, at most "
        f"{results['capture_peak_above_model_gib']:.2f} GiB above the model, {results['capture_tokens_per_s']:,.0f} tokens/s "
        f"({where})."
    )
