"""Policy `exact` with drafts from the text on a recurrent model that rewrites code: what it gains, and what an undo takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, geometric_mean
from time import perf_counter
from typing import Any

from tide_bench.build_cache import run_in_process
from tide_bench.report import Report
from tide_runtime import Engine, EngineOptions, ThreadOptions
from tide_runtime.bundle.manifest import ADVANCE

from benchmarks.hybrids.toy_model import KIND
from benchmarks.tasks.task_run import PairedTask, converse, differing_tokens, run_round
from benchmarks.tasks.task_set import load_tasks

_ROUNDS = 3
COLUMNS = ("task", "tokens", "full, tokens/s", "exact over full", "tokens/pass", "drafted", "accepted", "differ")


@dataclass(frozen=True)
class RewrittenTask:
    """One task under `full` and `exact`. ``passes``: of `exact`; ``differing``: tokens that are not `full`'s."""

    id: str
    tokens: int
    full_tokens_per_s: float
    speedup: float
    passes: int
    drafted: int
    accepted: int
    differing: int

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / max(1, self.passes)

    def cells(self) -> list[str]:
        figures = f"{self.full_tokens_per_s:.0f}", f"{self.speedup:.2f}", f"{self.tokens_per_pass:.2f}"
        return [self.id, str(self.tokens), *figures, *map(str, (self.drafted, self.accepted, self.differing))]


@dataclass
class Rewriting:
    """``undo_ms``: of each undo of rejected drafts, in a round of its own. ``pass_ms``: of all passes of that round, the mean."""

    tasks: list[RewrittenTask] = field(default_factory=list)
    undo_ms: list[float] = field(default_factory=list)
    pass_ms: float = 0.0


def run_rewriting(bundle: Path) -> Rewriting:
    """Every task under both policies in turn, with a user's options, and the undos of one more round."""
    (kind,) = (kind for kind in load_tasks() if kind.kind == KIND)
    found = Rewriting()
    full = Engine.load(bundle, EngineOptions(policy="full", threads=ThreadOptions(shared=True), verify=False), device="cpu")
    exact = full.with_options(replace(full.options, policy="exact"))
    with full, exact:
        pairs = [PairedTask(kind.kind, task.id) for task in kind.tasks]
        for number in range(_ROUNDS):
            for pair, task in zip(pairs, kind.tasks, strict=True):
                run_round(pair, (full, exact), None, kind, task, f"round {number}")
        found.tasks = [_row(pair) for pair in pairs]
        _time_undos(full, found.undo_ms)
        with full.with_options(replace(full.options, policy="exact")) as timed:
            runs = [converse(timed, kind, task, "timed") for task in kind.tasks]
        passes = sum(reply.stats.deep_passes for run in runs for reply in run.replies)
        found.pass_ms = 1e3 * sum(run.decode_s for run in runs) / passes
    return found


def _row(pair: PairedTask) -> RewrittenTask:
    full, exact = pair.full_run, pair.other_run
    assert full is not None and exact is not None
    stats = [reply.stats for reply in exact.replies]
    return RewrittenTask(
        pair.id,
        len(exact.token_ids),
        full.decoded_tokens / full.decode_s if full.decoded_tokens else 0.0,
        pair.speedup,
        sum(one.deep_passes for one in stats),
        sum(sum(one.drafted.values()) for one in stats),
        sum(sum(one.accepted.values()) for one in stats),
        differing_tokens(exact.token_ids, full.token_ids),
    )


def _time_undos(engine: Engine, undo_ms: list[float]) -> None:
    """Have contexts that are made from now on add the time of each undo to ``undo_ms``."""
    backend: Any = engine.backend
    make = backend.context

    def context(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        cut = made.cut_rows

        def cut_rows(rows: Sequence[int], lengths: Sequence[int]) -> None:
            undone, began = backend.launches[ADVANCE], perf_counter()
            cut(rows, lengths)
            if backend.launches[ADVANCE] > undone:
                undo_ms.append(1e3 * (perf_counter() - began))

        made.cut_rows = cut_rows
        return made

    backend.context = context


def add_rewriting(report: Report, bundle: Path) -> None:
    found: Rewriting = run_in_process(run_rewriting, bundle)
    tasks = found.tasks
    drafted, accepted = sum(task.drafted for task in tasks), sum(task.accepted for task in tasks)
    report.rows += [{"kind": KIND, **asdict(task)} for task in tasks]
    report.rows.append({"undo_ms": found.undo_ms, "pass_ms": found.pass_ms})
    report.add("rewriting_speedup", geometric_mean(task.speedup for task in tasks))
    report.add("rewriting_worst", min(task.speedup for task in tasks))
    report.add("rewriting_accepted_per_pass", accepted / sum(task.passes for task in tasks))
    report.add("rewriting_accepted_pct", 100 * accepted / max(drafted, 1))
    report.add("rewriting_differing_tokens", sum(task.differing for task in tasks))
    undone = "No draft was rejected."
    if found.undo_ms:
        undo = fmean(found.undo_ms)
        undone = f"An undo of rejected drafts takes {undo:.2f} ms, a pass {found.pass_ms:.1f} ms."
        report.add("undo_ms_per_rejection", undo)
        report.add("undo_pct_of_step", 100 * undo / found.pass_ms)
    report.table(
        "Code rewritten by a toy hybrid, exact with drafts from the text",
        COLUMNS,
        [task.cells() for task in tasks],
        "A toy of Qwen3.5's layers that knows the replies by heart; batch 1, greedy, fp32. Speedup of decoding, median of "
        f"{_ROUNDS} rounds. "
        f"{undone}",
    )
