"""How often certified and naive thresholds exceed their promised rate: 200 random resplits of held-out text.

Each resplit chooses thresholds on a quarter of the documents and looks at the disagreement rate on the others. A rate above ε is
a violation; a certificate at confidence 1 - δ may have a share δ of them. Beside resplits of whole documents there are resplits
of windows of 256 tokens, which are more alike. What is promised is the rate of an average document; the column "by tokens" counts
violations by the rate of all tokens together instead, in which a few long documents can outweigh the rest.

No document that is judged takes part in the method: exit heads, and the order in which thresholds are tested, come from the
training documents, and no constant of the test is fitted to text. ``--synthetic`` needs no model: documents drawn from a known
population.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from tide_bench.report import Report
from tide_calibrate.certificate.risk import PolicyCounts, ThresholdFamily, fit_family, policy_counts
from tide_calibrate.traces.trace import SplitTrace

from benchmarks.exits.resplits import ARMS, EXITS, Parts, draws, judge, resplits, synthetic_trace

EPSILONS = (0.01, 0.05)
COLUMNS = (
    "model", "by", "ε", "thresholds", "violations", "by tokens", "mean disagreement", "tokens that exit", "layers saved",
    "certified",
)  # fmt: skip
Resample = Callable[[int], Iterator[Parts]]  # number of groups → parts


def pooled(traces: list[SplitTrace], family: ThresholdFamily, by: str) -> PolicyCounts:
    """The family's behaviour on every document, or window, of all traces."""
    groups = [np.unique(getattr(trace, by), return_inverse=True)[1] for trace in traces]
    parts = [policy_counts(trace, family.exits, family.thresholds, group) for trace, group in zip(traces, groups, strict=True)]
    return PolicyCounts(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.losses for part in parts]),
        np.concatenate([part.full_losses for part in parts]),
        np.concatenate([part.exits for part in parts]),
        np.concatenate([part.layers_saved for part in parts]),
        parts[0].num_layers,
    )


def measure(
    report: Report,
    name: str,
    by: str,
    pool: PolicyCounts,
    resample: Resample,
    confidence: float,
) -> None:
    """A row for every ε and arm."""
    for epsilon in EPSILONS:
        for key, arm in ARMS.items():
            outcome = judge(pool, arm, resample(len(pool.tokens)), epsilon, confidence)
            where = {"data": name, "by": by, "groups": len(pool.tokens), "tokens": int(pool.tokens.sum())}
            report.rows.append({**where, "epsilon": epsilon, "arm": key, **asdict(outcome)})


def synthetic_rows(report: Report, repeats: int, confidence: float) -> None:
    """20 documents drawn from 1,500, with and without scatter between documents; the truth is the rate of all."""
    for name, scatter in (("independent", 0.0), ("scattered", 0.5)):
        family = fit_family(synthetic_trace(100, scatter, seed=1), EXITS)
        pool = pooled([synthetic_trace(1500, scatter, seed=2)], family, "document")
        measure(report, f"synthetic_{name}", "document", pool, partial(draws, size=20, repeats=repeats, seed=3), confidence)


def add_table(report: Report) -> None:
    settings = report.settings
    caption = (
        f"{settings['repeats']} random resplits of held-out text, δ = {1 - settings['confidence']:.0%}: a violation is a "
        "disagreement rate above ε on the other documents; by tokens: violations by the rate of all tokens together; certified: "
        "resplits in which some tokens may stop."
    )
    report.table("Does the certificate hold?", COLUMNS, map(_cells, report.rows), caption)


def _cells(row: Mapping[str, Any]) -> list[str]:
    rates = [f"{row['violations']:.1%} ± {row['error']:.1%}", f"{row['token_weighted']:.1%}", f"{row['risk']:.2%}"]
    shares = [f"{row[name]:.1%}" for name in ("exit_share", "saved_share", "certified")]
    return [row["data"], row["by"], f"{row['epsilon']:.0%}", ARMS[row["arm"]].title, *rates, *shares]


def add_results(report: Report, confidence: float) -> None:
    """The worst share of violations over data and ε by document, and per case what it costs to be certain."""
    rows = [row for row in report.rows if row["by"] == "document"]
    report.add("token_weighted_violations_pct", 100 * max(row["token_weighted"] for row in rows if row["arm"] == "ltt"))
    for key, name in (("ltt", "violations_pct"), ("naive", "naive_violations_pct"), ("token", "token_violations_pct")):
        report.add(name, 100 * max(row["violations"] for row in rows if row["arm"] == key))
    worst = max((row for row in rows if row["arm"] == "ltt"), key=lambda row: row["violations"])
    report.add("violations_error_pct", 100 * worst["error"])
    report.add("delta_pct", 100 * (1 - confidence))
    for row in rows:
        prefix = {"ltt": "", "naive": "naive_", "token": "token_"}[row["arm"]]
        case = f"{row['data']}_{row['epsilon']:.0%}".rstrip("%")
        for figure in ("violations", "risk", "exit_share", "saved_share"):
            report.add(f"{case}_{prefix}{figure}_pct", 100 * row[figure])


def main(
    models: Annotated[str, typer.Option(help="Comma-separated: layerskip, stock.")] = "layerskip,stock",
    data: Annotated[str, typer.Option(help="library (held-out files of this installation), or a file or directory.")] = "library",
    checkpoints: Annotated[str, typer.Option(help="Comma-separated: layers before each exit.")] = "4,8,12,16",
    head: Annotated[str, typer.Option(help="Kind of the exit heads.")] = "linear",
    windows: Annotated[int, typer.Option(help="Windows of 256 tokens in all.")] = 800,
    repeats: Annotated[int, typer.Option(help="Resplits.")] = 200,
    share: Annotated[float, typer.Option(help="Share of the documents that thresholds are chosen on.")] = 0.25,
    confidence: Annotated[float, typer.Option(help="1 - δ.")] = 0.95,
    synthetic: Annotated[bool, typer.Option("--synthetic", help="Known truth instead of models; seconds.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Count how often chosen thresholds exceed their promised rate."""
    source = {"data": data, "head": head, "checkpoints": checkpoints, "windows": windows, "models": models, "share": share}
    report = Report("certificate", repeats=repeats, confidence=confidence, **({"synthetic": True} if synthetic else source))
    if synthetic:
        synthetic_rows(report, repeats, confidence)
    else:
        from benchmarks.exits.exit_traces import ROUTER, exit_traces  # torch is not needed for synthetic traces

        layers = [int(layer) for layer in checkpoints.split(",")]
        for model in models.split(","):
            with tempfile.TemporaryDirectory() as temporary:
                train, held_out = exit_traces(model, data, layers, head, windows, Path(temporary))
            family = fit_family(train, [(layer, head, ROUTER) for layer in layers])
            for by in ("document", "window"):
                pool = pooled(held_out, family, by)
                measure(report, model, by, pool, partial(resplits, share=share, repeats=repeats, seed=0), confidence)
    add_table(report)
    add_results(report, confidence)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
