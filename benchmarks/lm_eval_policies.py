"""lm-evaluation-harness on a bundle's policies: `exact` answers every item as `full` does; `exit` stands beside its certificate.

    python -m benchmarks.lm_eval_policies                            # SmolLM2-135M fp32; `exit` on a calibrated demo model
    python -m benchmarks.lm_eval_policies --bundle engine/ --json build/lm_eval.json

The tasks are those of benchmarks/lm_eval_tasks; nothing is downloaded. An item is a document with all its requests: it differs
where a log-likelihood, a greedy flag or a text is not `full`'s, compared without any tolerance. The disagreement of `exit` is
what its certificate bounds: over the documents of `tide_python`, the mean share of tokens whose likeliest one is not `full`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from lm_eval import evaluate
from lm_eval.tasks import TaskManager
from tide_bench.lm_eval_model import TideLM
from tide_bench.report import Report
from tide_runtime.bundle.manifest import read_manifest
from tide_runtime.scoring import Score

from benchmarks.models.calibrated_bundles import PERCENTS, calibrated_bundles
from benchmarks.models.gguf_files import folder_of
from benchmarks.models.model_folders import CACHE

TASKS = Path(__file__).resolve().parent / "lm_eval_tasks"
TEXT, CODE = ("tide_choice", "tide_quote"), ("tide_python",)
BATCH = 8
ALONE = 1  # `exit` may run all layers where several sequences share a step


@dataclass(frozen=True)
class Case:
    """One bundle and the tasks whose texts its model can read."""

    name: str
    bundle: Path
    tasks: tuple[str, ...]

    @property
    def epsilon(self) -> float | None:
        """The disagreement that the bundle's exits are certified for; None where it has none."""
        calibration = read_manifest(self.bundle).calibration
        if calibration is None or calibration.certificate is None:
            return None
        certified = any(one.exit_threshold is not None for one in calibration.exits)
        return calibration.certificate.max_disagreement if certified else None


class KeepingLM(TideLM):
    """Keeps what the policy made of whole texts, token by token."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.readings: list[list[Score]] = []

    def read_texts(self, texts: Sequence[str], disable_tqdm: bool = False) -> Iterator[list[Score]]:
        for reading in super().read_texts(texts, disable_tqdm):
            self.readings.append(reading)
            yield reading


@dataclass(frozen=True)
class Outcome:
    """Results of one policy.

    Args:
        metrics: task → metric → value.
        answers: task → what the model answered to each item's requests.
        likeliest: of each whole text, the policy's likeliest token at every place.
    """

    metrics: dict[str, dict[str, float]]
    answers: dict[str, list[Any]]
    likeliest: list[list[int]]


def run_policy(case: Case, policy: str, batch: int) -> Outcome:
    """Run the case's tasks by one policy."""
    model = KeepingLM(bundle=str(case.bundle), policy=policy, batch_size=batch, device="cpu")
    with model.engine:
        tasks = TaskManager(include_path=str(TASKS), include_defaults=False).load(list(case.tasks))
        found = evaluate(model, tasks, bootstrap_iters=0)
    return Outcome(
        {
            task: {name.split(",")[0]: value for name, value in found["results"][task].items() if _is_metric(name)}
            for task in case.tasks
        },
        {task: [sample["resps"] for sample in found["samples"][task]] for task in case.tasks},
        [[token for score in reading for token in score.likeliest] for reading in model.readings],
    )


def _is_metric(name: str) -> bool:
    """Whether ``name`` is METRIC,FILTER and no standard error."""
    return "," in name and "_stderr" not in name


def differing(own: Sequence[Any], other: Sequence[Any]) -> int:
    """Items that are answered in another way; a log-likelihood counts when its last bit differs."""
    return sum(one != two for one, two in zip(own, other, strict=True))


def disagreement(own: Sequence[Sequence[int]], full: Sequence[Sequence[int]]) -> float:
    """Mean over documents of the share of tokens that are not `full`'s."""
    return float(np.mean([np.mean(np.not_equal(one, two)) for one, two in zip(own, full, strict=True)]))


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
    """Rows of one case, and the figures of its exits; returns how many items `exact` answers in another way than `full`."""
    epsilon = case.epsilon
    full, exact = (run_policy(case, policy, BATCH) for policy in ("full", "exact"))
    report.rows += [*rows_of(case, "full", full, full), *rows_of(case, "exact", exact, full)]
    if epsilon is not None:
        exits = run_policy(case, "exit", ALONE)
        report.rows += rows_of(case, "exit", exits, full)
        report.add("exit_disagreement_pct", 100 * disagreement(exits.likeliest, full.likeliest))
        report.add("epsilon_pct", 100 * epsilon)
    return sum(differing(exact.answers[task], full.answers[task]) for task in case.tasks)


def cases(bundle: Path | None, percent: int, cache: Path) -> list[Case]:
    """The given bundle with all tasks. Without one: SmolLM2 with the tasks in English, a demo model with the one in Python."""
    if bundle is not None:
        return [Case(bundle.name, bundle, TEXT + CODE)]
    return [
        Case("SmolLM2-135M", folder_of("fp32", cache), TEXT),
        Case("layerskip demo", calibrated_bundles("layerskip", cache)[percent], CODE),
    ]


def main(
    bundle: Annotated[Path | None, typer.Option(help="Run every task on this bundle alone.")] = None,
    percent: Annotated[int, typer.Option(help=f"Certified disagreement of the demo's exits, of {PERCENTS}.")] = PERCENTS[-1],
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Run lm-evaluation-harness tasks under every policy of a bundle."""
    if percent not in PERCENTS:
        raise typer.BadParameter(f"percent is {percent}; choose from: {', '.join(map(str, PERCENTS))}")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every data set that is loaded by a function
    report = Report("lm_eval_policies", bundle=bundle.name if bundle else None, percent=percent, batch=BATCH)
    differ = [measure(report, case) for case in cases(bundle, percent, cache)]
    report.add("lm_eval_exact_differs", sum(differ))
    items = sum({(row["model"], row["task"]): row["items"] for row in report.rows}.values())
    exits = ""
    if "epsilon_pct" in report.results:
        exits = (
            f"; `exit`, certified for {report.results['epsilon_pct']:.0f}%, differs from `full` at "
            f"{report.results['exit_disagreement_pct']:.1f}% of the tokens of held-out Python files"
        )
    report.statement(
        "lm-evaluation-harness",
        f"local tasks: {sum(differ)} of {items} items are answered by `exact` in another way than by `full`, to the last bit "
        f"of a log-likelihood{exits}.",
    )
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
