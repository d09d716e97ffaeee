"""Tables of benchmarks on SmolLM2-135M under the default policy: tasks, misleading prompts, predictions."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import table
from benchmarks.tasks.kind_figures import CAPTION, GEOMEANS, KIND_COLUMNS, PREFIXES, kind_rows


def tasks_table(run: dict[str, Any], where: str) -> str:
    """Every kind of work at every precision."""
    results, tasks = run["results"], [row for row in run["rows"] if "kind" in row]
    title = (
        f"**Eight kinds of work**: {run['settings']['model']}, the default policy without a calibration (`exact` with text "
        f"drafts) against `full`, batch 1, chat template, greedy, empty caches ({where}). {CAPTION}"
    )
    rows, notes = [], []
    for weights in dict.fromkeys(row["weights"] for row in tasks):
        own, prefix = [row for row in tasks if row["weights"] == weights], PREFIXES[weights]
        rows += [[own[0].get("title", weights), *cells] for cells in kind_rows(own)]
        notes.append(f"{weights} {results[GEOMEANS[weights]]:.2f}x, worst {results[f'{prefix}worst_prompt']:.2f}x")
    note = f"All {len(tasks)} tasks, geometric mean: {'; '.join(notes)}."
    if "batch8_geomean" in results:
        note += f" Batches of 8, fp32: {results['batch8_geomean']:.2f}x, worst {results['batch8_worst']:.2f}x."
    note += f" Tokens that differ from `full`'s: {results['differing_tokens']:.0f}."
    return "\n".join([title, "", *table(["weights", *KIND_COLUMNS], rows), "", note])


def second_tasks_line(run: dict[str, Any], where: str) -> str:
    """The tasks that were written after the policies were final."""
    results, tasks = run["results"], [row for row in run["rows"] if "kind" in row]
    parts = [
        f"{weights} {results[GEOMEANS[weights]]:.2f}x, worst {results[f'{PREFIXES[weights]}worst_prompt']:.2f}x"
        for weights in dict.fromkeys(row["weights"] for row in tasks)
    ]
    return (
        f"**The second set of tasks**, five of each kind, written after the policies were final ({where}): {'; '.join(parts)}. "
        f"Tokens that differ from `full`'s: {results['differing_tokens']:.0f}."
    )


def predictions_table(run: dict[str, Any], where: str) -> str:
    """What calibrations recommend and predict, beside the clock."""
    rows = [
        [
            row["model"], f"`{row['recommended']}`", f"`{row['title']}` at {row['percent']}%", f"{row['predicted']:.2f}",
            f"{row['measured']:.2f} ({row['low']:.2f}–{row['high']:.2f})", {True: "yes", False: "no"}.get(row["right"], ""),
        ]
        for row in run["rows"]
    ]  # fmt: skip
    title = (
        f"**Predictions of calibrations**: speed over `full`, one sequence, {run['settings']['prompts']} held-out prompts "
        f"({where}). Predicted: when the model was calibrated, on other texts. Measured: with the 95% interval over prompts."
    )
    return "\n".join([title, "", *table(["model", "recommended", "policy", "predicted", "measured", "right"], rows)])


def lm_eval_line(run: dict[str, Any], where: str) -> str:
    results = run["results"]
    items = {(row["model"], row["task"]): row["items"] for row in run["rows"]}
    line = (
        f"**lm-evaluation-harness**, local tasks ({where}): {results['lm_eval_exact_differs']:.0f} of {sum(items.values())} "
        "items are answered by `exact` in another way than by `full`, to the last bit of a log-likelihood"
    )
    if "epsilon_pct" not in results:
        return f"{line}."
    return (
        f"{line}; `exit`, certified for {results['epsilon_pct']:.0f}%, differs from `full` at "
        f"{results['exit_disagreement_pct']:.1f}% of the tokens of held-out Python files."
    )


def adversarial_table(run: dict[str, Any], where: str) -> str:
    """The worst prompts that the search found."""
    rows = []
    for row in run["rows"]:
        if row["search"] == "slow":
            cells = [
                f"SmolLM2-135M {row['weights']}",
                "slow",
                row.get("policy", "exact (default)"),
                "",
                f"{row['speedup']:.2f}",
                "0",
            ]
        else:
            differs = f"{row['disagreement']:.1%}" if "disagreement" in row else ""
            cells = ["demo layerskip", row["search"], row["policy"], f"{row['depth']:.1f}", f"{row['speedup']:.2f}", differs]
        rows.append(cells)
    title = (
        f"**Prompts made to mislead**: the worst that {run['settings']['generations']} generations of a search over token "
        f"sequences found ({where}). Deep: no token should stop early; shallow: all should; slow: drafts should cost most for "
        "what they give. Other tokens: share that differs from the model's after the same text."
    )
    return "\n".join([title, "", *table(["model", "search", "policy", "layers", "speedup over `full`", "other tokens"], rows)])
