"""Log-likelihoods by prompt passes against token by token: the same numbers, sooner.

    python -m benchmarks.scoring_speed                            # SmolLM2-135M fp32, two minutes on two cores
    python -m benchmarks.scoring_speed --bundle engine/ --json build/scoring.json

The requests are those of lm-evaluation-harness for the first items of `tide_choice` (short answers after a passage) and
`tide_python` (whole texts) in benchmarks/lm_eval_tasks. Both ways run policy `full` in fresh engines, first one request at a
time, as the harness does by default, then several at once. The times are the engine's, without the harness.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer
from lm_eval import evaluate
from lm_eval.tasks import TaskManager
from rich.console import Console
from rich.table import Table
from tide_bench.lm_eval_model import TideLM
from tide_bench.report import Report
from tide_runtime.scoring import Score

from benchmarks.lm_eval_policies import TASKS
from benchmarks.models.gguf_files import GGUF_MODELS, folder_of
from benchmarks.models.model_folders import CACHE

CHOSEN = ("tide_choice", "tide_python")
BATCHES = (1, 8)


class TimedLM(TideLM):
    """Notes what scoring takes, and every log-probability.

    Args:
        decode: tokens are decoded one after the other.
    """

    def __init__(self, decode: bool, **options: Any) -> None:
        super().__init__(**options)
        self.decode, self.seconds, self.logprobs = decode, 0.0, list[float]()

    def scores(self, texts: Sequence[tuple[list[int], int]], disable_tqdm: bool = False) -> Iterator[Score]:
        for part in self._parts(texts):
            begin = perf_counter()
            scores = self.engine.score_many(part, decode=self.decode)
            self.seconds += perf_counter() - begin
            for score in scores:
                self.logprobs += score.logprobs
                yield score


def scored(bundle: Path, decode: bool, batch: int, items: int) -> TimedLM:
    """The model after the tasks have run, closed."""
    model = TimedLM(decode, bundle=str(bundle), policy="full", batch_size=batch, device="cpu")
    with model.engine:
        model.engine.score([1, 2, 3])  # reads measured figures and binds shapes
        tasks = TaskManager(include_path=str(TASKS), include_defaults=False).load(list(CHOSEN))
        evaluate(model, tasks, limit=items, bootstrap_iters=0)
    return model


def main(
    bundle: Annotated[Path | None, typer.Option(help="Score with this bundle; without it SmolLM2-135M in fp32.")] = None,
    items: Annotated[int, typer.Option(min=1, help="Items of each task.")] = 8,
    cache: Annotated[Path, typer.Option(help="Where bundles are kept between runs.")] = CACHE,
    json: Annotated[Path | None, typer.Option(help="Also write everything to this file.")] = None,
) -> None:
    """Time lm-evaluation-harness's log-likelihoods by prompt passes and token by token, and compare them."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every data set that is loaded by a function
    folder = bundle or folder_of("fp32", GGUF_MODELS["smollm2"], cache / "smollm2")
    report = Report("scoring_speed", bundle=bundle.name if bundle else None, items=items)
    table = Table("requests at once", "tokens", "token by token, s", "prompt passes, s", "speedup", "largest difference")
    for batch in BATCHES:
        decoded, passed = (scored(folder, decode, batch, items) for decode in (True, False))
        gap = float(np.abs(np.subtract(decoded.logprobs, passed.logprobs)).max())
        row = {"batch": batch, "tokens": len(passed.logprobs), "decode_s": decoded.seconds, "prompt_s": passed.seconds}
        report.rows.append({**row, "speedup": decoded.seconds / passed.seconds, "largest_difference": gap})
        table.add_row(*(f"{value:.4g}" for value in report.rows[-1].values()))
        suffix = "" if batch == 1 else f"_{batch}"
        report.add(f"scoring_speedup{suffix}", decoded.seconds / passed.seconds)
        report.add(f"scoring_largest_difference{suffix}", gap)
    Console().print(table)
    report.finish(json)


if __name__ == "__main__":
    typer.run(main)
