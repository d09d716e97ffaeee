"""lm-evaluation-harness on a bundle: `exact` answers every item as `full` does.

    python -m benchmarks.lm_eval_policies                            # SmolLM2-135M fp32, and a demo model with exits
    python -m benchmarks.lm_eval_policies --bundle engine/ --json build/lm_eval.json

The tasks are those of bench/benchmarks/lm_eval_tasks; nothing is downloaded. An item is a document with all its requests: it
differs where a log-likelihood, a greedy flag or a text is not `full`'s, compared without any tolerance.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from lm_eval import evaluate
from lm_eval.tasks import TaskManager
from tide_bench.lm_eval_model import TideLM
from tide_bench.report import Report

from benchmarks.models.calibrated_bundles import PERCENTS, calibrated_bundles
from benchmarks.models.gguf_files import folder_of
from benchmarks.models.model_folders import CACHE

TASKS = Path(__file__).resolve().parent / "lm_eval_tasks"
TEXT, CODE = ("tide_choice", "tide_quote"), ("tide_python",)
BATCH = 8


@dataclass(frozen=True)
class Case:
    """One bundle and the tasks whose texts its model can read."""

    name: str
    bundle: Path
    tasks: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """Results of one policy.

    Args:
        metrics: task → metric → value.
        answers: task → what the model answered to each item's requests.
    """

    metrics: dict[str, dict[str, float]]
    answers: dict[str, list[Any]]


def run_policy(case: Case, policy: str) -> Outcome:
    """Run the case's tasks by one policy."""
    model = TideLM(bundle=str(case.bundle), policy=policy, batch_size=BATCH, device="cpu")
    with model.engine:
        tasks = TaskManager(include_path=str(TASKS), include_defaults=False).load(list(case.tasks))
        found = evaluate(model, tasks, bootstrap_iters=0)
    return Outcome(
        {
            task: {name.split(",")[0]: value for name, value in found["results"][task].items() if _is_metric(name)}
            for task in case.tasks
        },
        {task: [sample["resps"] for sample in found["samples"][task]] for task in case.tasks},
    )


def _is_metric(name: str) -> bool:
    """Whether ``name`` is METRIC,FILTER and no standard error."""
    return "," in name and "_stderr" not in name


def differing(own: Sequence[Any], other: Sequence[Any]) -> int:
    """Items that are answered in another way; a log-likelihood counts when its last bit differs."""
    return sum(one != two for one, two in zip(own, other, strict=True))


def rows_of(case: Case, policy: str, own: Outcome, full: Outcome) -> list[dict[str, Any]]:
    """A row for each metric of each task."""
    return [
        {
            "model": case.name,
            "policy": policy,
            "task": task,
            "items": len(own.answers[task]),
            "differing": differing(own.answers[task], full.answers[task]),
            "metric": metric,
            "value": value,
        }
        for task in case.tasks
        for metric, value in own.metrics[task].items()
    ]


def measure(report: Report, case: Case) -> int:
    """Rows of one case; returns how many items `exact` answers in another way than `full`."""
    full, exact = (run_policy(case, policy) for policy in ("full", "exact"))
    report.rows += [*rows_of(case, "full", full, full), *rows_of(case, "exact", exact, full)]
    return sum(differing(exact.answers[task], full.answers[task]) for task in case.tasks)


def cases(bundle: Path | None, cache: Path) -> list[Case]:
    """The given bundle with all tasks. Without one: SmolLM2 with the tasks in English, a demo model with the one in Python."""
    if bundle is not None:
        return [Case(bundle.name, bundle, TEXT + CODE)]
    return [
        Case("SmolLM2-135M", folder_of("fp32", cache), TEXT),
        Case("layerskip demo", calibrated_bundles("layerskip", cache)[PERCENTS[0]], CODE),
    ]


def main(
    bundle: Annotated[Path | None, typer.Option(help="Run every task on this bundle alone.")] = None,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Run lm-evaluation-harness tasks under `full` and `exact`."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every data set that is loaded by a function
    report = Report("lm_eval_policies", bundle=bundle.name if bundle else None, batch=BATCH)
    differ = [measure(report, case) for case in cases(bundle, cache)]
    report.add("lm_eval_exact_differs", sum(differ))
    items = sum({(row["model"], row["task"]): row["items"] for row in report.rows}.values())
    report.statement(
        "lm-evaluation-harness",
        f"local tasks: {sum(differ)} of {items} items are answered by `exact` in another way than by `full`, to the last bit "
        "of a log-likelihood.",
    )
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
